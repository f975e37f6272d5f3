"""What a person sees of a run: log lines, metrics.jsonl, loss.png, timeline.png, run.json.

Rank 0 reports; where nodes share no disk, so does the first worker of each, to its own disk.

Metrics are functions of a step's statistics; sinks are places that their values go to.
"""

from mingpt.report.files import read_records
from mingpt.report.history import (
    GenerationStart,
    load_history,
    mark_ended,
    read_durable_step,
    read_job_start,
    read_suspects,
)
from mingpt.report.log import open_log
from mingpt.report.metrics import StepStats
from mingpt.report.run_logger import RunLogger, StepTimer, is_reported

__all__ = [
    "GenerationStart",
    "RunLogger",
    "StepStats",
    "StepTimer",
    "is_reported",
    "load_history",
    "mark_ended",
    "open_log",
    "read_durable_step",
    "read_job_start",
    "read_records",
    "read_suspects",
]
