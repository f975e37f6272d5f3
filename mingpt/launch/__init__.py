"""What starts a job: a worker's life from first line to end, and the agent of plain `python train.py`.

`elastic/` lets any node die. Exit codes are chosen in distributed/exit.py. Importing this package does not
import torch.
"""
