"""A run: what it starts from, its loop, its state, what is saved when, its folder and who owns it.

`trainer.py` is the loop, and `start.py` finds what a run starts from. A claim (claim.py) lets only one job at
a time write to a run folder and to its snapshots.
"""
