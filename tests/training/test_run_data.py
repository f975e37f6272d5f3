"""Which tokenizer a run has that goes on from a snapshot or takes over weights."""

from pathlib import Path

import pytest
from support.snapshots import make_manifest

from mingpt.base.errors import UserError
from mingpt.config.cli import build
from mingpt.data import CharTokenizer
from mingpt.data.corpus import open_data
from mingpt.snapshot import StoredState
from mingpt.training.contents import describe_tokenizer
from mingpt.training.run_data import Named, Origin, load_corpus

TEXT = "To be, or not to be, that is the question.\n" * 20
OWN = CharTokenizer.train(TEXT)
SAVED = CharTokenizer.train(TEXT + "z")  # in the snapshot, whose model has more rows
MANIFEST = make_manifest(3, tokenizer=describe_tokenizer(SAVED, 20))
STATE = StoredState(MANIFEST, SAVED.to_bytes(), [], {}, 0, None)
NONE = make_manifest(3)
NAMED, OTHER = ("named", SAVED.to_bytes()), ("other", OWN.to_bytes())
UNREADABLE = ("away", UserError("data.tokenizer away cannot be read"))


@pytest.mark.parametrize(
    ("state", "is_restart", "origin", "named", "expected"),
    [
        (None, False, None, None, OWN),
        (None, False, None, NAMED, SAVED),
        (None, False, None, UNREADABLE, "data.tokenizer away cannot be read"),
        (None, False, (MANIFEST, SAVED.to_bytes()), None, SAVED),
        (None, False, (NONE, None), None, "have no tokenizer that can be read: name it by data.tokenizer"),
        (STATE, False, None, None, SAVED),
        (STATE, False, None, NAMED, SAVED),
        (STATE, False, None, OTHER, "data.tokenizer=other is not the tokenizer of this run's snapshots"),
        (STATE, False, None, UNREADABLE, SAVED),
        (STATE, True, None, OTHER, SAVED),
    ],
)
def test_a_snapshots_tokenizer_goes_before_a_named_one_and_that_before_the_texts(
    state: StoredState | None,
    is_restart: bool,
    origin: Origin | None,
    named: Named | None,
    expected: CharTokenizer | str,
    tmp_path: Path,
) -> None:
    (tmp_path / "play.txt").write_text(TEXT)
    tokenizer = named[0] if named else "auto"
    path = str(tmp_path / "play.txt")
    config = build({"data.path": path, "data.tokenizer": tokenizer, "data.block_size": 8})
    words = config, open_data(config.data), state, is_restart, origin, named, True
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load_corpus(*words)
    else:
        found = load_corpus(*words).tokenizer
        assert found and found.fingerprint() == expected.fingerprint()
