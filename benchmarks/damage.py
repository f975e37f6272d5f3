"""Damaged snapshots: 2,000 random bit flips, and every truncation at the edge of a record, of a snapshot as large as the default run's.

    python benchmarks/damage.py

A record of the tensor file is its length, its header or one tensor; of the manifest, a line. None may load; the one before must be found by
itself. Exit code 1 otherwise.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, row

sys.path.insert(0, str(ROOT))
from mingpt.config import Config, to_dict
from mingpt.model import GPT
from mingpt.optim import Optimizer
from mingpt.snapshot import Folder
from mingpt.stage import pack


def state() -> dict[str, torch.Tensor]:
    config = Config()
    torch.manual_seed(1)
    model = GPT(config.model, vocab_size=60, block_size=config.data.block_size)
    optimizer = Optimizer(model, config.optimizer)
    for tensor in optimizer.state_dict().values():
        tensor.normal_()
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    return tensors | {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}


def edges(content: bytes, kind: str) -> list[int]:
    """Lengths at which the file is cut: where each record ends, and one byte to either side."""
    if kind == "json":
        ends = [number + 1 for number, byte in enumerate(content) if byte == ord("\n")]
    else:
        length = int.from_bytes(content[:8], "little")
        described = json.loads(content[8 : 8 + length])
        ends = [8, 8 + length, *(8 + length + tensor["data_offsets"][1] for tensor in described.values())]
    return sorted({cut for end in [0, *ends] for cut in (end - 1, end, end + 1) if 0 <= cut < len(content)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, silent, fallen_back, tried = random.Random(arguments.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(str(Path(name, "snapshots")))
        folder.prepare()
        content = pack(state())
        for step in (10, 20):
            about: dict[str, Any] = {"step": step, "windows": 16 * step, "config": to_dict(Config()), "vocabulary": "abc", "metrics": {}}
            folder.write(about, content)
        paths = {kind: Path(folder.path(f"step_00000020.{kind}")) for kind in ("safetensors", "json")}
        whole = {kind: path.read_bytes() for kind, path in paths.items()}
        cuts = [(kind, cut) for kind in paths for cut in edges(whole[kind], kind)]
        # Half of the flips in each file, which is where a small file's turn comes too.
        flips = [(kind, dice.randrange(8 * len(whole[kind]))) for kind in paths for _ in range(arguments.flips // 2)]
        for number, (kind, where) in enumerate([*flips, *cuts]):
            broken = bytearray(whole[kind])
            if number < len(flips):
                broken[where // 8] ^= 1 << where % 8
            else:
                del broken[where:]
            paths[kind].write_bytes(broken)
            found, wrong = folder.newest()
            silent += found is not None and found.manifest["step"] == 20
            fallen_back += found is not None and found.manifest["step"] == 10 and list(wrong) == [20] and found.content == content
            tried += 1
            paths[kind].write_bytes(whole[kind])
        found, wrong = folder.newest()
        intact = found is not None and found.manifest["step"] == 20 and not wrong
    row(bytes=len(content), flips=len(flips), truncations=len(cuts), loaded_silently=silent, fell_back=fallen_back, intact_one_loads=intact)
    return 0 if silent == 0 and fallen_back == tried and intact else 1


if __name__ == "__main__":
    sys.exit(main())
