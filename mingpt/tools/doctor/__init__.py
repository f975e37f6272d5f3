"""Why a cluster does not start: each worker reports its facts, rank 0 says in sentences what is wrong.

Nothing here needs a working process group: facts travel over the launcher's store, with time limits.
"""
