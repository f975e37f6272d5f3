"""The modules that carry out a run: its start, training loop, state, snapshots and run folder.

`start.py` finds what a run starts from; `resume.py` decides whether it may go on from there; `run_folder.py`
makes the folders, and compares what must be equal on all workers; `run.py` builds the run, and `trainer.py`
is the loop. Which snapshot is the newest is decided in mingpt/snapshot/search.py.
"""
