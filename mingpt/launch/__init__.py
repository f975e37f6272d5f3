"""How a job starts: a worker's life from first line to end, and the agent of plain `python train.py`.

`elastic/` is a rendezvous for torchrun with which a job survives the loss of any node. A worker's exit
code is chosen in distributed/exit.py, and the job's, with the time that stopped workers have, in agent.py.
Importing this package does not import torch.
"""
