"""Mistake: to write a new snapshot over the only one.

    python -m tutorial.mistakes.only_snapshot

If the process is killed while it writes, the old snapshot is gone and half of the new one cannot be loaded.
Right: write another file, fsync it, rename it by os.replace. The name always stands for one whole snapshot.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch


def save(path: Path, written: Path, data: bytes) -> None:
    with written.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)  # what comes after it is never reached
        file.write(data[len(data) // 2 :])
        os.fsync(file.fileno())
    os.replace(written, path)


if __name__ == "__main__":
    for way, name in ("wrong", "snapshot.pt"), ("right", "new.pt"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.pt"
            torch.save({"step": 200}, path)  # only to have the bytes of the new snapshot
            arguments = path, path.with_name(name), path.read_bytes()
            torch.save({"step": 100}, path)  # the only snapshot, when the new one is written
            process = torch.multiprocessing.get_context("spawn").Process(target=save, args=arguments)
            process.start()
            process.join()
            try:
                kept = torch.load(path)["step"]
            except Exception:
                kept = 0
        print(f"{way}: {kept} steps of training are kept")
