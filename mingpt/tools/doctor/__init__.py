"""Find out why a cluster does not start: workers report facts, rank 0 prints a sentence per fault.

Facts travel over the launcher's store, with time limits, so no working process group is needed.
"""
