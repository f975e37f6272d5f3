"""How a job starts: the agent of plain `python train.py`, and a rendezvous for torchrun.

With the rendezvous, `elastic/`, a job survives the loss of any node. A worker's life is in distributed/, and
its exit code is chosen in distributed/exit.py; that of the job, with the time that stopped workers have, in
agent.py. Importing this package does not import torch.
"""
