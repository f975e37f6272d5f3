"""The modules that carry out a run: its start, training loop, state, snapshots, run folder and claims.

`start.py` finds what a run starts from, `run.py` builds it, and `trainer.py` is the loop. A claim (claim.py)
lets only one job at a time write to a run folder, or to the place of its snapshots.
"""
