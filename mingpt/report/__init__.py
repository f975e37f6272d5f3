"""What a person sees of a run: log lines, metrics.jsonl, loss.png, run.json. Only rank 0 reports.

A sink that cannot show a value leaves it out; training never depends on a sink.
"""

from mingpt.report.history import RunHistory, read_run_id
from mingpt.report.log import open_log
from mingpt.report.metrics import METRICS, StepStats
from mingpt.report.run_logger import SINKS, RunLogger
from mingpt.report.sink import RunInfo, Sink
from mingpt.report.step_timer import StepTimer

__all__ = [
    "METRICS",
    "SINKS",
    "RunHistory",
    "RunInfo",
    "RunLogger",
    "Sink",
    "StepStats",
    "StepTimer",
    "open_log",
    "read_run_id",
]
