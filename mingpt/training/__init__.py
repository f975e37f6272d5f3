"""The modules that carry out a run: its start, training loop, state, snapshots and run folder.

`start.py` finds the state from which a run starts; `resume.py` decides whether the run may go on from that
state; `run_folder.py` makes the run folders, and compares what must be equal on all workers; `run.py` builds
the run, and `trainer.py` has the training loop. mingpt/snapshot/search.py decides which snapshot is the
newest.
"""
