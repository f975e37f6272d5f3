"""Damaged snapshots of the default run's size: 2,000 bit flips, and every truncation at the edge of a record.

    python benchmarks/damage.py

Both have several parts. A record of a tensor file is its length, its header or one tensor; of the manifest, a
line. No damaged snapshot may load, and the one before must be found instead. Exit code 1 otherwise.
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

from mingpt.config import Config, to_dict
from mingpt.model import GPT
from mingpt.optim import Optimizer
from mingpt.snapshot import (
    Snapshot,
    SnapshotSaver,
    SnapshotStore,
    StagingBuffer,
    Transfer,
    make_layout,
    specs_of,
)

OLDER, NEWER = 10, 20  # steps; the newer snapshot is damaged
PART_BYTES = 2 << 20  # two parts of weights, and four of optimizer state


def make_state() -> dict[str, torch.Tensor]:
    """The tensors of the default run, with random numbers for the optimizer's state."""
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
    return tensors


def truncations(content: bytes, name: str) -> list[int]:
    """Lengths to which the file is cut: where each record ends, and one byte to either side."""
    if name.endswith(".json"):
        ends = [number + 1 for number, byte in enumerate(content) if byte == ord("\n")]
    else:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        ends = [8, 8 + length, *(8 + length + tensor["data_offsets"][1] for tensor in header.values())]
    cuts = {cut for end in [0, *ends] for cut in (end - 1, end, end + 1)}
    return sorted(cut for cut in cuts if 0 <= cut < len(content))


def damages(whole: dict[str, bytes], flips: int, rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """("flip" or "truncation", name of a file, its damaged content); each file has as many flips."""
    for name, content in whole.items():
        for _ in range(flips // len(whole)):
            bit = rng.randrange(8 * len(content))
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            yield "flip", name, bytes(damaged)
    for name, content in whole.items():
        for cut in truncations(content, name):
            yield "truncation", name, content[:cut]


def save_both(store: SnapshotStore, tensors: dict[str, torch.Tensor]) -> None:
    """The two snapshots."""
    store.prepare()
    staging = StagingBuffer(tensors)
    staging.fill(tensors)
    saver = SnapshotSaver(store, keep_last=2, keep_best=False)
    for step in (OLDER, NEWER):
        transfer = Transfer(make_layout(specs_of(tensors), step, PART_BYTES), staging)
        saver.write_once(make_manifest(step, 16 * step, to_dict(Config())), transfer)


def holds(found: Snapshot, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a snapshot has these tensors and no others."""
    names = found.entries.keys()
    return names == tensors.keys() and all(torch.equal(found.read(name), tensors[name]) for name in names)


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, silent, fell_back = random.Random(arguments.seed), 0, 0
    tried = {"flip": 0, "truncation": 0}
    tensors = make_state()
    with tempfile.TemporaryDirectory() as name:
        store = SnapshotStore(str(Path(name, "snapshots")))
        save_both(store, tensors)
        paths = {path.name: path for path in sorted(Path(store.root).glob(f"step_{NEWER:08d}*"))}
        whole = {name: path.read_bytes() for name, path in paths.items()}
        for damage, file, damaged in damages(whole, arguments.flips, rng):
            paths[file].write_bytes(damaged)
            found, corrupt = store.find_newest()
            step = found.manifest["step"] if found else None
            silent += step == NEWER
            if found and step == OLDER and list(corrupt) == [NEWER] and holds(found, tensors):
                fell_back += 1
            tried[damage] += 1
            paths[file].write_bytes(whole[file])
        found, corrupt = store.find_newest()
        intact_one_loads = found is not None and found.manifest["step"] == NEWER and not corrupt
    row(
        files=len(whole),
        bytes=sum(map(len, whole.values())),
        flips=tried["flip"],
        truncations=tried["truncation"],
        loaded_silently=silent,
        fell_back=fell_back,
        intact_one_loads=intact_one_loads,
    )
    return 0 if silent == 0 and fell_back == sum(tried.values()) and intact_one_loads else 1


if __name__ == "__main__":
    sys.exit(main())
