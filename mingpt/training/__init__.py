"""The modules that carry out a run: its start, training loop, state, snapshots and run folder.

- `run_folder.py` makes the run folders, and compares what must be equal on all workers.
- `start.py` finds the state from which a run starts; mingpt/snapshot/search.py decides which snapshot is the
  newest.
- `resume.py` decides whether the run may go on from that state.
- `run.py` builds the run.
- `trainer.py` has the training loop.
"""
