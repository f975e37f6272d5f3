"""All ranks get the same data, or none; each reads them itself."""

from pathlib import Path

import pytest
from support.ranks import HOST, run_ranks

from mingpt.base.errors import NodeRefused, PeersMissing, UserError
from mingpt.config.cli import build
from mingpt.data.source import AbsentFile
from mingpt.training.run_data import load_data


@pytest.mark.parametrize(
    ("ranks", "round", "expected", "sentence"),
    [
        ([0, 1], 1, [UserError, UserError], f"/data differ between {HOST} and {HOST}: copy "),
        ([0], 1, [AbsentFile, AbsentFile], f"1/data does not exist (on {HOST})"),
        ([1], 1, [AbsentFile, AbsentFile], f"0/data does not exist (on {HOST})"),
        ([0], 2, [PeersMissing, NodeRefused], f"1/data does not exist; the job goes on without {HOST}"),
    ],
)
def test_a_node_without_the_same_data_is_refused(
    ranks: list[int], round: int, expected: list[type], sentence: str, tmp_path: Path
) -> None:
    """If the job has begun, it goes on without a node that has none."""
    for rank in ranks:
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "data").write_text(f"the text of {rank}")

    found = run_ranks(
        2, lambda context: load_data(build({"data.path": f"{tmp_path}/{context.rank}/data"}), context), round
    )
    assert [type(error) for error in found] == expected and sentence in str(found[1])
