"""The tokens of a text."""

import hashlib

import pytest

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import make_corpus
from mingpt.data.corpus import open_data

TEXT = "Où? Ça, la mer; 海と空。 " * 40
SIZE = len(set(TEXT))


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
    ("name", "way_out"),
    [
        ("a.jsonl", "mingpt prepare"),
        ("https://host/A.JSONL?download=1", "mingpt prepare"),
        ("a.tar.gz", "unpack the archive first"),
        ("s3://bucket/train_*.bin", "named by their folder"),
    ],
)
def test_what_training_does_not_read_is_refused_with_a_way_out(name: str, way_out: str) -> None:
    with pytest.raises(UserError, match=f"^data.path .* is not a text: .*{way_out}"):
        open_data(DataConfig(path=name))
