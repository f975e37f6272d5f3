"""Why a cluster does not start: each worker says what it finds, rank 0 says what is wrong, in sentences.

Nothing here needs a working process group: facts travel over the launcher's store, with time limits.
"""
