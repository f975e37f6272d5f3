"""How a job starts: a worker's life from first line to end, and the agent of plain `python train.py`.

`elastic/` is a rendezvous for torchrun with which a job survives the loss of any node. Exit codes are chosen
in distributed/exit.py. Importing this package does not import torch.
"""
