"""How a job starts: the agent of plain `python train.py`, and a rendezvous for torchrun.

With the rendezvous in elastic/, a job can survive the loss of any node. Under plain `python train.py`,
agent.py chooses the job's exit code, and how long workers may take to stop; under torchrun, torchrun chooses
both. mingpt/distributed/exit.py chooses the exit code of a worker. Importing this package does not import
torch.
"""
