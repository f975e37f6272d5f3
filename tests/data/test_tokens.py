"""The tokens of a text, and data/make_corpus.py, which writes the embedded play."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import make_corpus
from mingpt.data.corpus import open_data
from mingpt.tools.jobs import ROOT

TEXT = "Où? Ça, la mer; 海と空。 " * 40
SIZE = len(set(TEXT))
PATH = str(ROOT / "data" / "input.txt")
PLAY = Path(PATH).read_bytes()


def test_no_character_of_validation_is_trained_on() -> None:
    corpus = make_corpus(TEXT.encode(), DataConfig(block_size=8, val_fraction=0.25))
    n_train = int(len(TEXT) * 0.75)
    assert (len(corpus.train.tokens), len(corpus.val.tokens)) == (n_train, len(TEXT) - n_train)
    assert corpus.tokenizer
    windows = [part.read([0], len(part.tokens))[0].tolist() for part in (corpus.train, corpus.val)]
    assert corpus.tokenizer.decode(windows[0] + windows[1]) == TEXT
    assert corpus.val_bytes == len(TEXT[n_train:].encode())
    assert corpus.fingerprint == hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "vocab_size", "sentence"),
    [
        (b"", None, "is empty"),
        (b"\xef\xbb\xbf", None, "is empty"),
        (b"abc" * 10, None, "the validation part .* has 3 tokens"),
        (b"a" * 50 + b"\xff" + b"a" * 50, None, "is not UTF-8: byte 0xff at offset 50"),
        (TEXT.encode("utf-16"), None, "is not UTF-8, but probably UTF-16.*`iconv -f UTF-16 -t UTF-8`"),
        (TEXT.encode(), SIZE - 1, f"data.vocab_size is {SIZE - 1}, and the tokenizer has {SIZE} tokens"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(content: bytes, vocab_size: int | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_corpus(content, DataConfig(block_size=8, vocab_size=vocab_size))


def test_a_byte_order_mark_changes_nothing() -> None:
    plain, marked = (
        make_corpus(TEXT.encode(name), DataConfig(block_size=8)) for name in ("utf-8", "utf-8-sig")
    )
    assert marked.fingerprint == plain.fingerprint and marked.vocab_size == plain.vocab_size


@pytest.mark.parametrize(("rows", "expected"), [(None, SIZE), (SIZE, SIZE), (SIZE + 5, SIZE + 5)])
def test_the_embedding_may_have_more_rows_than_the_tokenizer_has_tokens(
    rows: int | None, expected: int
) -> None:
    assert make_corpus(TEXT.encode(), DataConfig(block_size=8, vocab_size=rows)).vocab_size == expected


@pytest.mark.parametrize(
    ("content", "settings", "is_known"),
    [
        (PLAY, {"path": PATH}, True),
        (PLAY, {"path": PATH, "val_fraction": 0.2}, False),
        (PLAY[:-1], {"path": PATH}, False),
        (PLAY, {"path": "."}, False),
    ],
    ids=["the play", "another part", "another text", "another place"],
)
def test_the_entropy_floor_is_known_for_the_embedded_play_alone(
    content: bytes, settings: dict[str, Any], is_known: bool
) -> None:
    about = json.loads((ROOT / "data" / "input.json").read_text())
    floor = make_corpus(content, DataConfig(**settings)).entropy_floor
    assert floor == (about["val_nats_per_character"] if is_known else None)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        *((name, "mingpt prepare") for name in ("a.jsonl", "a.txt.gz", "a.parquet", "A.JSONL", "a.Zip")),
        ("https://host/a.jsonl?download=1", "mingpt prepare"),
        *((name, "unpack the archive first") for name in ("a.tar", "a.tar.gz", "a.TGZ", "a.tbz2")),
        *((f"{place}train_*.bin", "named by their folder") for place in ("", "s3://bucket/")),
    ],
)
def test_what_training_does_not_read_is_refused_with_a_way_out(name: str, way_out: str) -> None:
    with pytest.raises(UserError, match=f"^data.path .* is not a text: .*{way_out}"):
        open_data(DataConfig(path=name))


def test_the_embedded_play_is_what_its_program_writes() -> None:
    command = [sys.executable, "data/make_corpus.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entropy_counts_every_choice_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with an independent count: a choice among n equally likely options has a surprisal of log n."""
    monkeypatch.syspath_prepend(str(ROOT / "data"))
    from make_corpus import surprisals

    of_cat = surprisals((("cat ", 1.0), ("car ", 1.0), ("dog ", 2.0)), "cat ")
    assert sum(of_cat) == pytest.approx(np.log(4)) and of_cat[1] == 0.0
