"""Why a cluster does not start: each worker says what it finds, rank 0 says what is wrong, in sentences.

Nothing here needs a working process group: facts travel over the launcher's store, with time limits.
"""

from mingpt.doctor.claim import show_claims
from mingpt.doctor.endpoint import check_endpoint
from mingpt.doctor.facts import Facts
from mingpt.doctor.table import make_table
from mingpt.doctor.verdict import find_faults

__all__ = ["Facts", "check_endpoint", "find_faults", "make_table", "show_claims"]
