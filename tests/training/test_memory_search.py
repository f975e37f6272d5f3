"""Snapshots in memory whose parts lie on several nodes, which are folders here; ranks are threads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import CONFIG, MANIFEST, check_values, make_state
from support.ranks import run_ranks
from support.single_process import SingleProcess
from support.snapshots import write
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot
from mingpt.base.rows import split_rows
from mingpt.config import to_dict
from mingpt.distributed import DistributedContext
from mingpt.snapshot import MemorySaver, MemorySnapshots, Sharding, SnapshotStore
from mingpt.snapshot.layout import specs_of
from mingpt.snapshot.memory import plan_copies
from mingpt.snapshot.slots import Slots
from mingpt.training.search import find_in_memory, find_latest
from mingpt.training.state import TOKENIZER_TENSOR, check_shard, is_sharded


class Nodes:
    """The memory of some nodes, and the workers that write to it; `node_of` has each worker's node."""

    def __init__(self, folder: Path, node_of: Sequence[int], weights: bool = True) -> None:
        self.node_of, self.weights, self.generation = node_of, weights, "0" * 32
        self.memories = [
            MemorySnapshots(str(folder / f"node{node}"), "id", folder, node) for node in sorted(set(node_of))
        ]
        for memory in self.memories:
            memory.root.parent.mkdir(exist_ok=True)
        self.slots: dict[tuple[int, str], Slots] = {}
        self.fields: dict[str, Any] = {}  # fields of all manifests
        self.whole: dict[str, Tensor] = {}  # tensors besides those of model and optimizer
        self.keeper = plan_copies(node_of)

    def save(self, step: int, lost: Sequence[int] = (), **fields: Any) -> None:
        """Write all workers' parts but those of `lost`. `fields` are more fields of the last manifest."""
        firsts = [self.node_of.index(node) for node in self.node_of]
        for rank, node in enumerate(self.node_of):
            more = fields if rank == len(self.node_of) - 1 else {}
            if rank not in lost:
                self.write(rank, node, f"-worker-{rank}", step, firsts[rank] == rank, more)
            keeper = self.keeper[rank]
            if keeper is not None and keeper not in lost and rank not in lost:
                self.write(rank, self.node_of[keeper], f"-copy-{rank}", step, False, more)

    def write(
        self, rank: int, node: int, suffix: str, step: int, with_whole: bool, more: dict[str, Any]
    ) -> None:
        workers = len(self.node_of)
        shard = {"rank": rank, "workers": workers, "weights": self.weights, "generation": self.generation}
        manifest = MANIFEST | self.fields | {"step": step, "windows": step * 8, "shard": shard} | more
        part = self.whole if with_whole else {}
        for name, tensor in make_state(step).items():
            if is_sharded(manifest, name, tuple(tensor.shape)):
                rows = split_rows(len(tensor), workers)[rank]
                part = part | {name: tensor[rows.start : rows.stop]}
            elif with_whole:
                part = part | {name: tensor}
        slots = self.slots.setdefault((node, suffix), self.memories[node].make_slots(suffix))
        if not slots.buffers:
            slots.open(specs_of(part))
        slots.begin()
        slots.buffer.fill(part)
        slots.commit(manifest)

    def find(self, nodes: Sequence[int]) -> int | None:
        """The step that a worker on each of these nodes finds; the values are checked."""

        def work(context: DistributedContext) -> int | None:
            memory = self.memories[nodes[context.rank]]
            found = find_in_memory(memory, context, -1, None, check_shard)
            return None if found is None else check_values(found, context)

        return same(run_ranks(len(nodes), work))


def same(results: Sequence[int | Exception | None]) -> int | None:
    """The one result that all ranks have returned."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert len(set(results)) == 1
    return results[0]  # type: ignore[return-value]


@pytest.mark.parametrize("weights", [True, False], ids=["fsdp", "sharded optimizer"])
@pytest.mark.parametrize("node_of", [[0], [0] * 13, [0, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 2]])
def test_the_parts_of_all_workers_are_the_whole_state_also_without_any_one_of_several_nodes(
    node_of: list[int], weights: bool, tmp_path: Path
) -> None:
    """There are thirteen workers, so that some hold no row of some tensors."""
    nodes = Nodes(tmp_path, node_of, weights)
    for step in (5, 10):
        nodes.save(step)
    present = sorted(set(node_of))
    assert nodes.find(present) == 10
    for lost in present if len(present) > 1 else []:
        assert nodes.find([node for node in present if node != lost]) == 10


def test_a_step_of_which_a_part_is_missing_or_damaged_does_not_count(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])
    nodes.save(5)
    nodes.save(10, lost=[1])
    assert nodes.find([0]) == 5
    nodes.save(15)
    assert nodes.find([0]) == 15
    flip_a_bit(nodes.memories[0].root / "node-0-worker-1" / "step_00000015.safetensors")
    assert nodes.find([0]) is None, "worker 0 has 10 and 15, worker 1 has 5 and a damaged 15"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_in_place_of_a_damaged_part_its_copy_is_read(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 1])
    nodes.save(5)
    flip_a_bit(nodes.memories[0].root / "node-0-worker-0" / "step_00000005.safetensors")
    assert nodes.find([0, 1]) == 5
    assert nodes.find([0]) is None, "what is not sharded was in the damaged file alone"


@pytest.mark.parametrize(
    ("other", "step"),
    [
        ({"audit": "1" * 64}, 5),
        ({"windows": 99}, 5),
        ({"config": to_dict(CONFIG) | {"seed": 3}}, 5),
        ({"shard": {"rank": 1, "workers": 2, "weights": True, "generation": "1" * 32}}, 5),
        ({"config": to_dict(CONFIG) | {"run_dir": "elsewhere"}}, 10),
    ],
    ids=["audit", "windows", "config", "generation", "only the run folder"],
)
def test_parts_that_are_not_of_one_save_are_no_step(other: dict[str, Any], step: int, tmp_path: Path) -> None:
    """Two generations may have computed the same step, with other bits under `reduction=fast`."""
    nodes = Nodes(tmp_path, [0, 0])
    nodes.save(5)
    nodes.save(10, **other)
    assert nodes.find([0]) == step


def test_a_tokenizer_is_whole_on_each_node(tmp_path: Path) -> None:
    """The tokenizer is too large for the manifest."""
    nodes = Nodes(tmp_path, [0, 0, 1])
    nodes.fields = {"vocabulary": "", "tokenizer": {"kind": "json", "vocab_size": 11}}
    nodes.whole = {TOKENIZER_TENSOR: torch.arange(100, dtype=torch.uint8)}
    nodes.save(5)
    for memory in nodes.memories:
        found = find_in_memory(memory, SingleProcess(), -1, None, check_shard)
        assert found
        assert torch.equal(found.tensor(TOKENIZER_TENSOR, SingleProcess()), nodes.whole[TOKENIZER_TENSOR])


def test_what_is_newer_counts_whether_it_is_whole_or_in_parts_in_memory_or_on_disk(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])
    memory = nodes.memories[0]
    store = SnapshotStore(str(tmp_path / "snapshots"))
    store.prepare()

    def save_to_disk(step: int) -> None:
        write(store, whole(step), make_state(step))

    def whole(step: int) -> dict[str, Any]:
        return MANIFEST | {"step": step, "windows": step * 8}

    def newest() -> int | None:
        latest = find_latest(store, memory, SingleProcess(), is_restart=True)
        return check_values(latest.snapshot, SingleProcess()) if latest.snapshot else None

    assert newest() is None
    for step, save in ((5, save_to_disk), (10, nodes.save), (20, save_to_disk)):
        save(step)
        assert newest() == step
    saver = MemorySaver(memory, Sharding())
    saver.save(whole(30), make_state(30))
    assert saver.thread
    saver.thread.join()
    assert newest() == 30


@pytest.mark.parametrize("change", [{"rank": 1}, {"workers": 3}, {"weights": False}])
def test_a_part_has_the_rows_that_its_manifest_says(change: dict[str, Any], tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])
    nodes.save(5)
    snapshot = SnapshotStore(str(nodes.memories[0].root / "node-0-worker-0")).open(5)
    shard = snapshot.manifest["shard"] | change
    with pytest.raises(CorruptSnapshot, match="has shape"):
        check_shard(snapshot.manifest | {"shard": shard}, snapshot.entries)
