"""What a run costs before it is started: memory, bytes sent, time; which strategy fits, or what to change.

Figures follow from the configuration by formulas that tests and benchmarks compare with what is measured.
"""

from mingpt.plan.advice import advise, strategies
from mingpt.plan.data import measure_data
from mingpt.plan.memory import Memory, estimate
from mingpt.plan.traffic import bytes_sent
from mingpt.plan.workload import Workload

__all__ = [
    "Memory",
    "Workload",
    "advise",
    "bytes_sent",
    "estimate",
    "measure_data",
    "strategies",
]
