"""The reports that a person reads of a run: log.txt, metrics.jsonl, loss.png, timeline.png, run.json.

Rank 0 reports. Where nodes share no disk, one worker of each node also reports to the node's own run folder.

A metric is a function of a step's statistics. A sink is a place for the metrics' values, such as a plot.
"""

from mingpt.report.files import read_records
from mingpt.report.history import load_history, mark_ended, read_job_start
from mingpt.report.log import open_log
from mingpt.report.metrics import RunStart, StepStats
from mingpt.report.run_logger import RunLogger, StepTimer, is_reported

__all__ = [
    "RunLogger",
    "RunStart",
    "StepStats",
    "StepTimer",
    "is_reported",
    "load_history",
    "mark_ended",
    "open_log",
    "read_job_start",
    "read_records",
]
