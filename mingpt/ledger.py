"""run.json: what happened to a run, generation by generation, for whoever asks later."""

import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

from mingpt.launch import Departure
from mingpt.metrics import replace_file

log = logging.getLogger(__name__)

HOPELESS = 3  # generations that fail at the same step, one after the other


def run_id(run_dir: Path) -> str | None:
    """The random name of the run that lives there, as far as this node can see it."""
    try:
        known = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, TypeError, KeyError):
        known = None  # there is none yet, or it is damaged, which Ledger tells
    return known if isinstance(known, str) and known.isalnum() else None


class Ledger:
    """Kept by rank 0. `status` is running, finished, stopped or failed; times are seconds, `began` and `seen` since 1970.

    A generation is the workers between two restarts: how many, the steps it began at and came to, and how it ended. `exact` says
    that `to_step` was told by a worker of it and is not merely the last step on record. `restart` tells it from a job's first.
    """

    def __init__(self, run_dir: Path, run: str, versions: dict[str, str]) -> None:
        self.path = run_dir / "run.json"
        self.content: dict[str, Any] = {"id": run, "status": "running", "generations": [], "changes": []}
        self.content |= {"steps_lost": 0, "seconds_lost": 0.0, "goodput": 1.0}
        try:
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(earlier, dict) or not isinstance(earlier.get("generations"), list):
                raise ValueError("not a ledger")
            self.content |= earlier
        except FileNotFoundError:
            pass  # a new run
        except ValueError:
            self.path.replace(self.path.with_name("damaged-run.json"))
            log.warning("%s is damaged and set aside as damaged-run.json", self.path)
        self.content["id"] = run
        self.content["versions"] = versions | {"python": platform.python_version()}
        self.generations: list[dict[str, Any]] = self.content["generations"]

    def begin(self, workers: int, step: int, departure: Departure | None, restart: bool, changes: list[str]) -> str | None:
        """A generation starts at `step`. Returns one line on the one before, if that did not end in order."""
        sentence = None
        if changes:
            self.content["changes"].append({"step": step, "settings": changes})
        if self.generations and self.generations[-1]["end"] == "running":
            self.close(self.generations[-1], step, departure, restart)
            last = self.generations[-1]
            sentence = f"{last['end']} at step {last['to_step']}; resumed from {step} with {workers} worker{'s' * (workers > 1)}"
        now = time.time()
        self.generations.append(
            {"workers": workers, "from_step": step, "to_step": step, "exact": False, "restart": restart, "began": now, "seen": now, "end": "running"}
        )
        self.content["status"] = "running"
        self.write()
        return sentence

    def close(self, last: dict[str, Any], step: int, departure: Departure | None, restart: bool) -> None:
        """Book the end of a generation that could not do so itself, and what it cost to be back at `step`."""
        told, recorded = departure.step() if departure else None, last["to_step"]
        last["exact"] = told is not None and told >= last["to_step"]
        last["to_step"] = max(last["to_step"], told or 0, step)
        last["end"] = departure.sentence() if departure else "all workers vanished"
        self.content["steps_lost"] += last["to_step"] - step
        # Since the last record until now, unless the job itself had ended; and the recorded steps that must be done again.
        waited = time.time() - last["seen"] if restart else 0.0
        self.content["seconds_lost"] = round(self.content["seconds_lost"] + waited + max(0, recorded - step) * last.get("step_s", 0.0), 3)

    def hopeless(self) -> str | None:
        """One sentence if the last generations of this job all failed at the same step."""
        if not self.generations[-1]["restart"]:
            return None  # somebody started the job again, perhaps with the cause put right
        ended = [entry for entry in self.generations if entry["end"] != "running"][-HOPELESS:]
        same = len({entry["to_step"] for entry in ended}) == 1 and all(entry["exact"] for entry in ended)
        if len(ended) < HOPELESS or not same or not all(entry["restart"] for entry in ended[1:]):
            return None
        return f"{HOPELESS} generations failed one after the other at step {ended[0]['to_step'] + 1} ({ended[-1]['end']}): going on would repeat it"

    def seen(self, step: int, step_s: float) -> None:
        """The running generation has completed `step`, at so many seconds a step."""
        self.generations[-1] |= {"to_step": step, "seen": time.time(), "step_s": step_s}
        self.write()

    def end(self, status: str, step: int, how: str) -> None:
        self.generations[-1] |= {"to_step": step, "exact": True, "seen": time.time(), "end": how}
        self.content["status"] = status
        self.write()

    def restarts(self) -> list[int]:
        """The steps at which later generations began."""
        return [entry["from_step"] for entry in self.generations[1:]]

    def summary(self) -> str:
        """The whole run in a line."""
        count, redone, lost = len(self.generations), self.content["steps_lost"], self.content["seconds_lost"]
        return f"{count} generation{'s' * (count > 1)}, {redone} steps done twice, {lost:.1f} s lost, goodput {self.content['goodput']:.1%}"

    def write(self) -> None:
        # Time after an orderly stop is nobody's loss: a run's time is that of its generations and what was lost between them.
        trained = sum(entry["seen"] - entry["began"] for entry in self.generations)
        between = sum(max(0.0, after["began"] - before["seen"]) for before, after in zip(self.generations, self.generations[1:], strict=False)
                      if after["restart"])  # fmt: skip
        self.content["goodput"] = round(1 - self.content["seconds_lost"] / max(trained + between, self.content["seconds_lost"], 1e-9), 4)
        replace_file(self.path, json.dumps(self.content, indent=1) + "\n")
