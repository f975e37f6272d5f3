"""`python -m mingpt snapshots` lists the snapshots of a run, and changes nothing."""

from pathlib import Path

from support.commands import refused, run_here
from support.golden import Golden
from support.snapshots import file_names, make_manifest, make_store, write

from mingpt.tools.snapshots import main


def test_a_list_of_snapshots_has_a_line_for_each_with_its_loss_size_and_state(
    tmp_path: Path, golden: Golden
) -> None:
    """All bytes are checked; nothing is renamed. Files that belong to no snapshot are left out."""
    store = make_store(tmp_path)
    for step, loss in ((10, 2.0), (170, 1.8486), (200, None), (340, 2.102), (345, 1.25)):
        write(store, make_manifest(step, loss))
    store.quarantine(345, "a worker computed wrongly", "suspect")
    store.quarantine(10, "its manifest is damaged", "damaged")
    path = Path(store.path("step_00000200.optimizer.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    Path(store.path("partial-step_00000350")).touch()
    before = file_names(store)
    golden(run_here(main, tmp_path).stdout)
    assert file_names(store) == before
    golden(refused(main, tmp_path / "none"))
