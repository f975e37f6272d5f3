"""Damaged snapshots of the default run's size: 2,000 bit flips, and every truncation at the edge of a record.

    python benchmarks/damage.py

A record of the tensor file is its length, its header or one tensor; of the manifest, a line. No damaged
snapshot may load, and the one before must be found instead. Exit code 1 otherwise.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from common import make_manifest, row

from mingpt.config import Config
from mingpt.model import GPT
from mingpt.optim import Optimizer
from mingpt.settings import to_dict
from mingpt.snapshot import SnapshotStore, to_safetensors

OLDER, NEWER = 10, 20  # steps; the newer snapshot is damaged


def state_content() -> bytes:
    """A tensor file as the default run writes it, with random numbers for the optimizer's state."""
    config = Config()
    torch.manual_seed(1)
    model = GPT(config.model, vocab_size=60, block_size=config.data.block_size)
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    optimizer = Optimizer(weights, shapes, config.optimizer).state_dict()
    for tensor in optimizer.values():
        tensor.normal_()
    tensors = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}
    return bytes(to_safetensors(tensors))


def truncations(content: bytes, kind: str) -> list[int]:
    """Lengths to which the file is cut: where each record ends, and one byte to either side."""
    if kind == "json":
        ends = [number + 1 for number, byte in enumerate(content) if byte == ord("\n")]
    else:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        ends = [8, 8 + length, *(8 + length + tensor["data_offsets"][1] for tensor in header.values())]
    cuts = {cut for end in [0, *ends] for cut in (end - 1, end, end + 1)}
    return sorted(cut for cut in cuts if 0 <= cut < len(content))


def damages(whole: dict[str, bytes], flips: int, rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """("flip" or "truncation", kind of file, its damaged content); half of the flips in each file."""
    for kind, content in whole.items():
        for _ in range(flips // 2):
            bit = rng.randrange(8 * len(content))
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            yield "flip", kind, bytes(damaged)
    for kind, content in whole.items():
        for cut in truncations(content, kind):
            yield "truncation", kind, content[:cut]


def save_both(store: SnapshotStore, content: bytes) -> None:
    """The two snapshots."""
    store.prepare()
    for step in (OLDER, NEWER):
        store.write(make_manifest(step, 16 * step, to_dict(Config())), content)


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, silent, fell_back = random.Random(arguments.seed), 0, 0
    tried = {"flip": 0, "truncation": 0}
    content = state_content()
    with tempfile.TemporaryDirectory() as name:
        store = SnapshotStore(str(Path(name, "snapshots")))
        save_both(store, content)
        paths = {kind: Path(store.path(f"step_{NEWER:08d}.{kind}")) for kind in ("safetensors", "json")}
        whole = {kind: path.read_bytes() for kind, path in paths.items()}
        for damage, kind, damaged in damages(whole, arguments.flips, rng):
            paths[kind].write_bytes(damaged)
            found, corrupt = store.find_newest()
            step = found.manifest["step"] if found else None
            silent += step == NEWER
            if found and step == OLDER and list(corrupt) == [NEWER] and found.content == content:
                fell_back += 1
            tried[damage] += 1
            paths[kind].write_bytes(whole[kind])
        found, corrupt = store.find_newest()
        intact_one_loads = found is not None and found.manifest["step"] == NEWER and not corrupt
    row(
        bytes=len(content),
        flips=tried["flip"],
        truncations=tried["truncation"],
        loaded_silently=silent,
        fell_back=fell_back,
        intact_one_loads=intact_one_loads,
    )
    return 0 if silent == 0 and fell_back == sum(tried.values()) and intact_one_loads else 1


if __name__ == "__main__":
    sys.exit(main())
