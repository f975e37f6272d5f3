"""The modules that carry out a run: its start, training loop, state and snapshots.

- `facts.py` gathers what a rank knows when a generation (the workers between two restarts) starts.
- `plan.py` decides from the facts of all ranks what happens, and why a start is refused.
- `start.py` carries the plan out; mingpt/snapshot/search.py decides which snapshot is the newest.
- `run.py` builds the run.
- `trainer.py` has the training loop.
"""
