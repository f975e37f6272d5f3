"""metrics.jsonl: a line per record, written at once, each with its `step`; one curve across restarts."""

import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any

from mingpt.report.files import LineFile, read_lines, read_records, remove_quietly, write_all
from mingpt.report.sink import RunInfo, Sink, Values

log = logging.getLogger(__name__)


class JsonlSink(Sink):
    """A fresh run keeps the records of an earlier one as metrics-old-<n>.jsonl.

    Records that cannot be written wait in memory, and a snapshot takes them along: `RunInfo.unwritten` are
    those that the snapshot, from which this generation starts, has brought.
    """

    def __init__(self, run: RunInfo) -> None:
        self.run, self.path = run, run.run_dir / "metrics.jsonl"
        before = self.keep_earlier_records if run.is_fresh else None
        self.file = LineFile(self.path, before=before, may_write=run.may_write)
        self.file.retry()

    def keep_earlier_records(self) -> None:
        """Raises OSError."""
        if any(record["step"] for record in read_records(self.path)):
            names = (self.path.with_name(f"metrics-old-{number}.jsonl") for number in itertools.count(1))
            target = next(path for path in names if not path.exists())
            self.path.rename(target)
            log.warning("this is a fresh run: the records of an earlier one are kept in %s", target)

    def rewind(self, step: int) -> None:
        earlier = self.file.before  # it has not worked yet

        def put_right() -> None:
            if earlier is not None:
                earlier()
            self.drop_past(step)

        self.file.close()
        self.file.before = put_right
        self.file.retry()

    def drop_past(self, step: int) -> None:
        """Drop the records past `step`, and all at 0: they come again. Raises OSError.

        That is a truncation, which needs no room on the disk, unless dropped lines lie between others. A
        record that comes late, as one that was being written when storage hung, is put in its place.
        """
        unwritten = self.run.unwritten
        first_unwritten = unwritten[0]["step"] if unwritten else step + 1
        kept_bytes, is_dropping, needs_rewrite, found, last = 0, False, False, set(), (-1, False)
        for line, record in read_lines(self.path):
            if record is None or record["step"] > step or step == 0:
                is_dropping = True
                continue
            key = record_key(record)
            needs_rewrite = needs_rewrite or is_dropping or not line.endswith(b"\n") or key <= last
            kept_bytes, last = kept_bytes + len(line), key
            if record["step"] >= first_unwritten:
                found.add(key)
        if needs_rewrite:
            self.rewrite(step)
        elif is_dropping:
            os.truncate(self.path, kept_bytes)
        missing = [record for record in unwritten if record_key(record) not in found]
        self.file.pending.extendleft(encode(record) for record in reversed(missing))

    def rewrite(self, step: int) -> None:
        """Replace the file by its records up to `step`, each once and in order. Raises OSError."""
        partial = Path(f"{self.path}.partial")
        kept = {
            record_key(record): line.rstrip(b"\n") + b"\n"
            for line, record in read_lines(self.path)
            if record is not None and record["step"] <= step
        }
        try:
            with open(partial, "wb", buffering=0) as file:
                for key in sorted(kept):
                    write_all(file.fileno(), kept[key])
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError:
            remove_quietly(partial)
            raise

    def log(self, step: int, values: Values) -> None:
        self.file.write(encode({"step": step, **values}))

    def unwritten(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.waiting()]

    def flush(self) -> None:
        self.file.retry(sync=True)

    def close(self) -> None:
        self.file.retry(sync=True)


def encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def record_key(record: dict[str, Any]) -> tuple[int, bool]:
    """What a run has at most one record of."""
    return record["step"], "val/loss" in record
