"""How a job starts: the agent of plain `python train.py`, and a rendezvous for torchrun.

With the rendezvous in elastic/, a job can survive the loss of any node. Under plain `python train.py` with
several workers, agent.py chooses the job's exit code, and how long workers may take to stop. Under torchrun,
torchrun chooses both. mingpt/distributed/exit.py chooses the exit code of a worker. Importing this package
does not import torch.
"""
