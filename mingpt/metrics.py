"""What a person sees of a run: metrics.jsonl, log lines or a progress bar, the loss picture."""

import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

# Dense bf16 peak in FLOP/s, from the vendor's data sheets.
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12, "A10G": 70e12, "RTX 4090": 165e12}


class ConsoleHandler(logging.Handler):
    """Lines on stderr that do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except OSError:
            pass  # the terminal or the pipe is gone; log.txt goes on


def open_log(run_dir: Path | None) -> None:
    """Send the package's log to the terminal and to run_dir/log.txt; with None, nowhere (every rank but 0)."""
    logger = logging.getLogger("mingpt")
    logger.handlers.clear()
    logger.propagate = False
    if run_dir is None:
        logger.addHandler(logging.NullHandler())
        return
    logger.setLevel(logging.INFO)
    logger.addHandler(ConsoleHandler())
    written = logging.FileHandler(run_dir / "log.txt", encoding="utf-8")
    written.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(written)


def replace_file(path: Path, content: str) -> None:
    """Write a small file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def peak_flops(device_name: str) -> float | None:
    return next((peak for name, peak in PEAK.items() if name in device_name), None)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a line torn by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            if isinstance(record["step"], int):
                records.append(record)
        except (ValueError, TypeError, KeyError):
            log.warning("a line of %s that is no record is left out: %.60r", path, line)
    return records


class Metrics:
    """One object per record in metrics.jsonl, each a whole flushed line with its `step`; one clean curve, however often the run died."""

    def __init__(self, run_dir: Path, restored_step: int, fresh: bool) -> None:
        """Go on behind `restored_step`: records past it are dropped. A run that begins anew sets the records of an earlier one aside."""
        self.path = run_dir / "metrics.jsonl"
        if fresh and any(record["step"] for record in read_records(self.path)):
            number = next(number for number in itertools.count(1) if not (run_dir / f"metrics-old-{number}.jsonl").exists())
            self.path.rename(run_dir / f"metrics-old-{number}.jsonl")
            log.warning("the run begins anew: its earlier records are kept in %s", run_dir / f"metrics-old-{number}.jsonl")
        self.kept = [record for record in read_records(self.path) if record["step"] <= restored_step and restored_step]
        replace_file(self.path, "".join(json.dumps(record) + "\n" for record in self.kept))
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run
        self.last: dict[str, dict[str, Any]] = {}
        for record in self.kept:
            self.last["val" if "val/loss" in record else "train"] = record

    def record(self, step: int, values: Mapping[str, float | None]) -> dict[str, Any]:
        """Write one record; values that are None are not known here and left out."""
        entry = {"step": step, **{name: value for name, value in values.items() if value is not None}}
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        self.last["val" if "val/loss" in entry else "train"] = entry
        return entry

    def sync(self) -> None:
        """Make all records so far durable."""
        os.fsync(self.file.fileno())


class Progress:
    """A bar on a terminal, a line per record otherwise."""

    def __init__(self, first_step: int, max_steps: int) -> None:
        self.bar = tqdm(total=max_steps, initial=first_step, unit="step", file=sys.stderr, dynamic_ncols=True) if sys.stderr.isatty() else None
        self.max_steps = max_steps

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def show(self, record: dict[str, Any]) -> None:
        left = (self.max_steps - record["step"]) * record["step_s"]
        words = f"loss {record['train/loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(words, refresh=False)
        else:
            log.info("step %d/%d  %s  %.0f s left", record["step"], self.max_steps, words, left)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Picture:
    """run_dir/loss.png, drawn in the background so that training does not wait for matplotlib."""

    def __init__(self, run_dir: Path, floor: float | None) -> None:
        self.run_dir, self.floor = run_dir, floor
        self.thread: threading.Thread | None = None

    def draw(self, restarts: list[int], wait: bool = False) -> None:
        """Draw the metrics so far. While an earlier drawing is under way this does nothing, unless told to `wait`."""
        if self.thread and (wait or not self.thread.is_alive()):
            self.thread.join()
            self.thread = None
        if self.thread is None:
            self.thread = threading.Thread(target=draw_losses, args=(self.run_dir, self.floor, restarts), daemon=True)
            self.thread.start()
        if wait:
            self.thread.join()


def draw_losses(run_dir: Path, floor: float | None, restarts: list[int]) -> None:
    """Draw run_dir/metrics.jsonl as run_dir/loss.png: training and validation loss, restarts as dotted lines, the text's entropy as a dashed one."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no loss.png: matplotlib is not installed")
        return
    records = read_records(run_dir / "metrics.jsonl")
    figure = Figure(figsize=(8, 4.5), dpi=110)
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {
        "train/loss": {"color": "tab:blue", "alpha": 0.6, "linewidth": 1.0},
        "val/loss": {"color": "tab:orange", "marker": "o", "markersize": 3},
    }
    for name, style in styles.items():
        points = [(record["step"], record[name]) for record in records if name in record]
        axes.plot([step for step, _ in points], [loss for _, loss in points], label=name, **style)
    for number, step in enumerate(restarts):
        axes.axvline(step, color="tab:red", linestyle=":", linewidth=1, label="" if number else "restart")
    if floor is not None:
        axes.axhline(floor, color="gray", linestyle="--", linewidth=1, label=f"entropy of the text, {floor:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    partial = run_dir / "loss.partial.png"
    figure.savefig(partial)
    os.replace(partial, run_dir / "loss.png")
