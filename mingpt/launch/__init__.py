"""How a job starts: the program of train.py, and the agent of plain `python train.py`.

Under plain `python train.py` with several workers, agent.py chooses the job's exit code and, if torch allows
that, how long workers may take to stop. Under torchrun, torchrun chooses both. mingpt/distributed/exit.py
chooses the exit code of a worker. Importing this package does not import torch.
"""
