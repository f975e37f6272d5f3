"""How a job starts: the agent of plain `python train.py`, and a rendezvous for torchrun.

With the rendezvous in elastic/, a job can survive the loss of any node. agent.py chooses the exit code of a
job, and how long workers may take to stop; mingpt/distributed/exit.py chooses the exit code of a worker.
Importing this package does not import torch.
"""
