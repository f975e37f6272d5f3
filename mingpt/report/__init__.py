"""What a person sees of a run: log lines, metrics.jsonl, loss.png, run.json. Only rank 0 reports.

Metrics are functions of a step's statistics; sinks are places that their values go to.
"""

from mingpt.report.files import describe
from mingpt.report.history import RunHistory, mark_ended, read_run_id
from mingpt.report.log import open_log
from mingpt.report.metrics import METRICS, StepStats
from mingpt.report.run_logger import SINKS, RunLogger, is_reported
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
    "describe",
    "is_reported",
    "mark_ended",
    "open_log",
    "read_run_id",
]
