"""run.json: what happened to a run, generation by generation, for whoever asks later."""

import json
import platform
import time
import uuid
from pathlib import Path
from typing import Any

from mingpt.cluster import Departure
from mingpt.metrics import replace_file


class Ledger:
    """Kept by rank 0. `status` is running, finished, stopped or failed; times are seconds since 1970.

    A generation is the workers between two restarts: how many, the steps they began and ended at, when, and how it ended.
    """

    def __init__(self, run_dir: Path, versions: dict[str, str]) -> None:
        self.path = run_dir / "run.json"
        self.content: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "status": "running",
            "generations": [],
            "changes": [],
            "steps_lost": 0,
            "seconds_lost": 0.0,
        }
        try:
            self.content |= json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass  # a new run
        self.content["versions"] = versions | {"python": platform.python_version()}

    def begin(self, workers: int, step: int, departure: Departure | None, changes: list[str]) -> str | None:
        """A generation starts at `step`. Returns one line on the one before, if that did not end in order."""
        now, sentence = time.time(), None
        if changes:
            self.content["changes"].append({"step": step, "settings": changes})
        if self.content["generations"] and self.content["status"] in ("running", "failed"):
            last = self.content["generations"][-1]
            last["to_step"] = max(last["to_step"], step, (departure.step() if departure else None) or 0)
            last["end"] = departure.sentence() if departure else "all workers vanished" if self.content["status"] == "running" else last["end"]
            redone = last["to_step"] - step
            self.content["steps_lost"] += redone
            self.content["seconds_lost"] = round(self.content["seconds_lost"] + now - last["seen"] + redone * last.get("step_s", 0.0), 3)
            sentence = f"{last['end']} at step {last['to_step']}; resumed from {step} with {workers} worker{'s' * (workers > 1)}"
        self.content["generations"].append({"workers": workers, "from_step": step, "to_step": step, "began": now, "seen": now, "end": "running"})
        self.content["status"] = "running"
        self.write()
        return sentence

    def seen(self, step: int, step_s: float | None = None) -> None:
        """The running generation has completed `step`, at so many seconds a step."""
        self.content["generations"][-1] |= {"to_step": step, "seen": time.time()} | ({"step_s": step_s} if step_s is not None else {})
        self.write()

    def end(self, status: str, step: int, how: str | None = None) -> None:
        if self.content["generations"]:
            self.content["generations"][-1] |= {"to_step": step, "seen": time.time(), "end": how or status}
        self.content["status"] = status
        self.write()

    def restarts(self) -> list[int]:
        """The steps at which later generations began."""
        return [generation["from_step"] for generation in self.content["generations"][1:]]

    def write(self) -> None:
        replace_file(self.path, json.dumps(self.content, indent=1) + "\n")
