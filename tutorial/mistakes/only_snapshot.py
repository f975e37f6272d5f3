"""Mistake: writing a new snapshot over the only one.

    python -m tutorial.mistakes.only_snapshot

If the process is killed while it writes, the old snapshot is gone and half of the new one cannot be loaded.
Right: write another file, fsync it, rename it by os.replace. The name always stands for one whole snapshot.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path


def save(path: Path, written: Path, step: int, is_killed: bool) -> None:
    data = json.dumps({"step": step}).encode()  # stands for torch.save
    with written.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(data[len(data) // 2 :])
        os.fsync(file.fileno())
    os.replace(written, path)


if __name__ == "__main__":
    for way, name in ("wrong", "snapshot"), ("right", "new"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            for step, is_killed in (100, False), (200, True):
                arguments = path, path.with_name(name), step, is_killed
                process = multiprocessing.get_context("spawn").Process(target=save, args=arguments)
                process.start()
                process.join()
            content = path.read_text()
        kept = json.loads(content)["step"] if content.endswith("}") else 0
        print(f"{way}: {kept} steps of training are kept")
