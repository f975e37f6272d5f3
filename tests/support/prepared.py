"""Runs `python -m mingpt prepare`, and reads the folders that the command writes."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from mingpt.data.shards import TokenShards, open_shards
from mingpt.tools.jobs import ROOT, clean_environment
from mingpt.tools.prepare import main
from support.commands import run_here

END = "<|endoftext|>"
WORDS = [
    "the",
    " sea",
    "  two",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " ",
    "é",
    "海と空",
    "🙂",
    "42",
    "it's",
    END,
    "\u00a0",
    ".",
]


def run_apart(*words: object, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, which runs the Python code `before` first."""
    run = "runpy.run_module('mingpt', run_name='__main__', alter_sys=True)"
    start = f"import runpy, sys\n{before}\n{run}"
    command = [sys.executable, "-c", start, "prepare", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(**env), capture_output=True, text=True, timeout=300
    )


def prepared(*words: object) -> str:
    done = run_here(main, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def digests(folder: Path) -> dict[str, str]:
    names = sorted(path.name for path in folder.iterdir())
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def tokens_of(folder: Path, part: Literal["train", "val"]) -> list[int]:
    shards: TokenShards = getattr(open_shards(folder, 0.1), part)
    return shards.read([0], len(shards))[0].tolist()


def read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
    return meta


def mixed(characters: int, seed: int) -> str:
    rng, text = random.Random(seed), ""
    while len(text) < characters:
        text += "".join(rng.choices(WORDS, k=200))
    return text[:characters]
