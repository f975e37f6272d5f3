"""metrics.jsonl: a whole flushed line per record, each with its `step`; one curve across restarts."""

import itertools
import json
import logging
import os

from mingpt.report.files import read_records, replace_file
from mingpt.report.sink import RunInfo, Sink, Values

log = logging.getLogger(__name__)


class JsonlSink(Sink):
    """A fresh run keeps the records of an earlier one as metrics-old-<n>.jsonl."""

    def __init__(self, run: RunInfo) -> None:
        self.path = run.run_dir / "metrics.jsonl"
        if run.is_fresh and any(record["step"] for record in read_records(self.path)):
            names = (self.path.with_name(f"metrics-old-{number}.jsonl") for number in itertools.count(1))
            target = next(path for path in names if not path.exists())
            self.path.rename(target)
            log.warning("this is a fresh run: the records of an earlier one are kept in %s", target)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def rewind(self, step: int) -> None:
        self.file.close()
        kept = [record for record in read_records(self.path) if record["step"] <= step and step > 0]
        replace_file(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def log(self, step: int, values: Values) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()

    def flush(self) -> None:
        os.fsync(self.file.fileno())
