"""The search for the newest state, whose parts lie in several stores; nodes are folders, ranks threads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.memory import CONFIG, FIELDS, SHAPES, check_values, make_state
from support.ranks import run_ranks
from support.single_process import SingleProcess
from support.snapshots import make_manifest, make_store, write

from mingpt.base.errors import CorruptSnapshot
from mingpt.base.rows import RowMap
from mingpt.config import to_dict
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Found, Store, find_latest
from mingpt.snapshot.contents import check_shard, stored_rows
from mingpt.snapshot.memory import plan_copies


class Nodes:
    """The memory of some nodes, and the workers that write to it; `node_of` has each worker's node."""

    def __init__(self, folder: Path, node_of: Sequence[int], weights: bool = True) -> None:
        self.folder, self.node_of, self.weights = folder, node_of, weights
        self.disk = make_store(folder)
        self.tokenizer: bytes | None = None
        self.keeper = plan_copies(node_of)

    def stores(self, node: int) -> list[Store]:
        """The stores in a node's memory."""
        return [Store(str(path)) for path in sorted(self.folder.glob(f"node{node}/*"))]

    def save(self, step: int, lost: Sequence[int] = (), **fields: Any) -> None:
        """Write all workers' parts but those of `lost`. `fields` are more fields of the last manifest."""
        firsts = [self.node_of.index(node) for node in self.node_of]
        for rank, node in enumerate(self.node_of):
            more = fields if rank == len(self.node_of) - 1 else {}
            if rank not in lost:
                self.write(rank, f"node{node}/{rank}", step, firsts[rank] == rank, more)
            keeper = self.keeper[rank]
            if keeper is not None and keeper not in lost and rank not in lost:
                self.write(rank, f"node{self.node_of[keeper]}/{rank}-copy", step, False, more)

    def write(self, rank: int, place: str, step: int, with_whole: bool, more: dict[str, Any]) -> None:
        workers = len(self.node_of)
        shard = {"rank": rank, "workers": workers, "weights": self.weights, "generation": "0" * 32}
        tokenizer = {"kind": "json" if self.tokenizer else "none", "vocab_size": 11}
        manifest = make_manifest(step, **FIELDS | {"shard": shard, "tokenizer": tokenizer} | more)
        rows, part = RowMap(SHAPES, workers, ("model.", "optimizer.")[not self.weights :]), {}
        for name, tensor in make_state(step).items():
            if rows.by_rank(name):
                part[name] = tensor[rows.of(name, rank).start : rows.of(name, rank).stop]
            elif with_whole:
                part[name] = tensor
        (self.folder / place).mkdir(parents=True, exist_ok=True)
        store = Store(str(self.folder / place))
        write(store, manifest, part, self.tokenizer if with_whole else None)

    def find(self, nodes: Sequence[int]) -> int | None:
        """The step that a worker on each of these nodes finds; the values are checked."""

        def work(context: DistributedContext) -> int | None:
            found = self.search(nodes[context.rank], context)
            return check_values(found.state, context) if found.state else None

        return same(run_ranks(len(nodes), work))

    def search(self, node: int, context: DistributedContext, is_restart: bool = True) -> Found:
        """What a rank on this node finds."""
        stores = self.stores(node)
        return find_latest(self.disk, stores, context, check_shard, stored_rows, is_restart)


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
    flip_a_bit(tmp_path / "node0" / "1" / "step_00000015.safetensors")
    assert nodes.find([0]) is None, "worker 0 has 10 and 15, worker 1 has 5 and a damaged 15"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_in_place_of_a_damaged_part_its_copy_is_read(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 1])
    nodes.save(5)
    flip_a_bit(tmp_path / "node0" / "0" / "step_00000005.safetensors")
    assert nodes.find([0, 1]) == 5
    assert nodes.find([0]) is None, "what is not sharded was in the damaged file alone"


@pytest.mark.parametrize(
    ("other", "step"),
    [
        ({"windows": 99}, 5),
        ({"config": to_dict(CONFIG) | {"seed": 3}}, 5),
        ({"shard": {"rank": 1, "workers": 2, "weights": True, "generation": "1" * 32}}, 5),
        ({"config": to_dict(CONFIG) | {"run_dir": "elsewhere"}}, 10),
    ],
    ids=["windows", "config", "generation", "only the run folder"],
)
def test_parts_that_are_not_of_one_save_are_no_step(other: dict[str, Any], step: int, tmp_path: Path) -> None:
    """Two generations may have computed the same step, with other bits under `reduction=fast`."""
    nodes = Nodes(tmp_path, [0, 0])
    nodes.save(5)
    nodes.save(10, **other)
    assert nodes.find([0]) == step


def test_a_tokenizer_is_whole_on_each_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0, 1])
    nodes.tokenizer = b"the content of a tokenizer.json"
    nodes.save(5)
    for node in (0, 1):
        found = nodes.search(node, SingleProcess())
        assert found.state and found.state.tokenizer == nodes.tokenizer


def test_what_is_newer_counts_whether_it_is_whole_or_in_parts_in_memory_or_on_disk(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])

    def save_to_disk(step: int) -> None:
        write(nodes.disk, make_manifest(step, **FIELDS), make_state(step))

    assert nodes.find([0]) is None
    for step, save in ((5, save_to_disk), (10, nodes.save), (20, save_to_disk)):
        save(step)
        assert nodes.find([0]) == step
    whole = nodes.stores(0)[0]
    write(whole, make_manifest(30, **FIELDS), make_state(30))
    assert nodes.find([0]) == 30


def test_what_was_saved_to_memory_after_a_snapshot_that_is_gone_counts_in_a_restart_only(
    tmp_path: Path,
) -> None:
    """A user who deletes snapshots wants to go back; a restart may have lost a node with them."""
    nodes = Nodes(tmp_path, [0])
    write(nodes.disk, make_manifest(5, **FIELDS), make_state(5))
    nodes.save(12, after=10)
    for is_restart, expected in ((True, 12), (False, 5)):
        found = nodes.search(0, SingleProcess(), is_restart).state
        assert found and found.manifest.step == expected


def test_a_tokenizer_that_the_manifest_does_not_tell_of_is_damage(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0])
    write(nodes.disk, make_manifest(5, **FIELDS), make_state(5))
    write(nodes.disk, make_manifest(10, **FIELDS), make_state(10), b"a tokenizer")
    found = nodes.search(0, SingleProcess())
    assert found.state and found.state.manifest.step == 5


def test_a_part_of_a_state_on_disk_is_corrupt_and_the_whole_state_before_it_is_used(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])
    write(nodes.disk, make_manifest(5, **FIELDS), make_state(5))
    nodes.write(0, "snapshots", 10, True, {})
    found = nodes.search(0, SingleProcess())
    assert found.state and found.state.manifest.step == 5
    assert found.corrupt(0) == {10: "it is a part of a sharded state"}


@pytest.mark.parametrize("change", [{"rank": 1}, {"workers": 3}, {"weights": False}])
def test_a_part_has_the_rows_that_its_manifest_says(change: dict[str, Any], tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, [0, 0])
    nodes.save(5)
    snapshot = nodes.stores(0)[0].open(5)
    assert snapshot.manifest.shard
    shard = snapshot.manifest.shard.model_copy(update=change)
    with pytest.raises(CorruptSnapshot, match="has shape"):
        check_shard(snapshot.manifest.model_copy(update={"shard": shard}), snapshot.entries, None)
