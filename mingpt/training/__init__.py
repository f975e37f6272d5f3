"""A run: what it starts from, its loop, its state, what is saved when, its folder and who owns it.

`trainer.py` is the loop, `start.py` what a run starts from. By a claim (claim.py) one job at a time writes to
a run folder and to its snapshots.
"""
