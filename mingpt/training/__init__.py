"""The parts of a run are here: its start, loop, state and snapshots, its folder, and who may write there.

`trainer.py` is the loop, and `start.py` finds what a run starts from. A claim (claim.py) lets only one job at
a time write to a run folder and to its snapshots.
"""
