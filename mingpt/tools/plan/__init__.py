"""What a run costs before it is started: memory and bytes sent; which strategy fits, or what to change.

Figures follow from the configuration by formulas that tests and benchmarks compare with what is measured.
"""

from mingpt.tools.plan.command import advise, strategies
from mingpt.tools.plan.costs import Memory, bytes_sent, estimate
from mingpt.tools.plan.workload import Workload, measure_data

__all__ = [
    "Memory",
    "Workload",
    "advise",
    "bytes_sent",
    "estimate",
    "measure_data",
    "strategies",
]
