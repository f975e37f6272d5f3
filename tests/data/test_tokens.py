import hashlib
import json

import pytest
from conftest import ROOT
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import make_corpus
from mingpt.data.corpus import open_data

TEXT = "Où? Ça, la mer; 海と空。 " * 40
PLAY = ROOT / "data" / "input.txt"


def test_no_character_of_validation_is_trained_on() -> None:
    corpus = make_corpus(TEXT.encode(), DataConfig(block_size=8, val_fraction=0.25))
    n_train = int(len(TEXT) * 0.75)
    assert (len(corpus.train.tokens), len(corpus.val.tokens)) == (n_train, len(TEXT) - n_train)
    assert (
        corpus.tokenizer and isinstance(corpus.train.tokens, Tensor) and isinstance(corpus.val.tokens, Tensor)
    )
    assert corpus.tokenizer.decode([*corpus.train.tokens.tolist(), *corpus.val.tokens.tolist()]) == TEXT
    assert corpus.val_bytes == len(TEXT[n_train:].encode())
    assert corpus.fingerprint == hashlib.sha256(TEXT.encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"abc" * 10, "the validation part .* has 3 tokens"),
        (b"a" * 50 + b"\xff" + b"a" * 50, "is not UTF-8: byte 0xff at offset 50"),
        (TEXT.encode("utf-16"), "is not UTF-8, but probably UTF-16.*`iconv -f UTF-16 -t UTF-8`"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_corpus(content, DataConfig(block_size=8))


def test_a_byte_order_mark_changes_nothing() -> None:
    config = DataConfig(block_size=8)
    plain, marked = make_corpus(TEXT.encode(), config), make_corpus(TEXT.encode("utf-8-sig"), config)
    assert marked.fingerprint == plain.fingerprint and marked.vocab_size == plain.vocab_size


def test_the_embedding_may_have_more_rows_than_the_tokenizer_has_tokens_and_not_fewer() -> None:
    size = len(set(TEXT))
    assert make_corpus(TEXT.encode(), DataConfig(block_size=8)).vocab_size == size
    assert make_corpus(TEXT.encode(), DataConfig(block_size=8, vocab_size=size + 5)).vocab_size == size + 5
    with pytest.raises(
        UserError, match=f"data.vocab_size is {size - 1}, and the tokenizer has {size} tokens"
    ):
        make_corpus(TEXT.encode(), DataConfig(block_size=8, vocab_size=size - 1))


def test_the_entropy_floor_is_known_for_the_embedded_play_alone() -> None:
    content = PLAY.read_bytes()
    about = json.loads((ROOT / "data" / "input.json").read_text())
    path, floor = str(PLAY), about["val_nats_per_character"]
    assert make_corpus(content, DataConfig(path=path)).entropy_floor == floor
    assert make_corpus(content, DataConfig(path=path, val_fraction=0.2)).entropy_floor is None
    assert make_corpus(content[:-1], DataConfig(path=path)).entropy_floor is None
    assert make_corpus(content, DataConfig(path=".")).entropy_floor is None


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
