"""The reports on a run that a person reads: log.txt, metrics.jsonl, loss.png, run.json.

Rank 0 reports. If nodes share no disk, one worker of each node also reports to the node's own run folder.

A metric is a function of a step's statistics. A sink is a place for the metrics' values, such as a plot.
"""

from mingpt.report.history import load_history, mark_ended, read_job_start
from mingpt.report.log import open_log
from mingpt.report.metrics import RunStart, StepStats
from mingpt.report.run_logger import RunLogger, StepTimer
from mingpt.report.writing import read_records

__all__ = [
    "RunLogger",
    "RunStart",
    "StepStats",
    "StepTimer",
    "load_history",
    "mark_ended",
    "open_log",
    "read_job_start",
    "read_records",
]
