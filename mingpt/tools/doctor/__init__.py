"""Why a cluster does not start: each worker says what it finds, rank 0 says what is wrong, in sentences.

Nothing here needs a working process group: facts travel over the launcher's store, with time limits.
"""

from mingpt.tools.doctor.command import show_claims
from mingpt.tools.doctor.facts import Facts
from mingpt.tools.doctor.network import check_endpoint
from mingpt.tools.doctor.verdict import find_faults, make_table

__all__ = ["Facts", "check_endpoint", "find_faults", "make_table", "show_claims"]
