import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from mingpt.config import DataConfig, UserError
from mingpt.data import CharDataset, Vocabulary, prepare, read_bytes

TEXT = "Où? Ça, la mer; 海と空。 " * 40


def test_encoding_and_decoding_are_inverse_and_small() -> None:
    vocabulary = Vocabulary.of(TEXT)
    tokens = vocabulary.encode(TEXT)
    assert tokens.dtype == np.uint8 and vocabulary.decode(tokens.tolist()) == TEXT
    assert Vocabulary(vocabulary.characters).encode(TEXT).tolist() == tokens.tolist()


@pytest.mark.parametrize("character", ["~", "\U0010ffff", "\x00"])
def test_a_character_that_the_vocabulary_lacks_is_named(character: str) -> None:
    with pytest.raises(UserError, match=f"U\\+{ord(character):04X}"):
        Vocabulary.of(TEXT).encode("la" + character)


def test_no_character_of_validation_is_trained_on() -> None:
    corpus = prepare(TEXT.encode(), DataConfig(block_size=8, val_fraction=0.25))
    n_train = int(len(TEXT) * 0.75)
    assert (len(corpus.train.tokens), len(corpus.val.tokens)) == (n_train, len(TEXT) - n_train)
    assert corpus.vocabulary.decode([*corpus.train.tokens.tolist(), *corpus.val.tokens.tolist()]) == TEXT
    assert corpus.val_bytes == len(TEXT[n_train + 1 :].encode())


def test_a_window_is_an_input_and_its_targets_one_to_the_right() -> None:
    dataset = CharDataset(np.arange(50, dtype=np.uint8), 8)
    inputs, targets = dataset.__getitems__([0, 41])
    assert inputs.tolist() == [list(range(8)), list(range(41, 49))] and targets.tolist() == [list(range(1, 9)), list(range(42, 50))]
    assert torch.equal(dataset[41][1], targets[1]) and len(dataset) == 42


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 50])
def test_validation_scores_every_token_but_the_first_exactly_once(length: int) -> None:
    batches = list(CharDataset(np.arange(length, dtype=np.uint8), 8).in_order(3))
    assert [token for _, targets in batches for token in targets.flatten().tolist()] == list(range(1, length))
    assert all(torch.equal(inputs + 1, targets) and len(inputs) <= 3 for inputs, targets in batches)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"abc" * 10, "the validation part .* has 3 characters"),
        (b"a" * 50 + b"\xff" + b"a" * 50, "is not UTF-8: byte 0xff at offset 50"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        prepare(content, DataConfig(block_size=8))


def test_a_remote_text_is_cached_and_its_checksum_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip archive stands for the remote place: another fsspec driver, no network."""
    import zipfile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("play.txt", TEXT)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    url = f"zip://play.txt::file://{tmp_path}/texts.zip"
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT.encode()
    (cached,) = (tmp_path / "cache" / "mingpt").iterdir()
    cached.write_bytes(b"torn")
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT.encode() == cached.read_bytes()
    (tmp_path / "texts.zip").unlink()
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT.encode()
    with pytest.raises(UserError, match=r"cannot be read|does not exist"):
        read_bytes(DataConfig(path=url, sha256="0" * 64))


def test_another_checksum_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.sha256 asks for 000"):
        read_bytes(DataConfig(path=str(ROOT / "data" / "input.txt"), sha256="0" * 64))


@pytest.mark.parametrize(("url", "sentence"), [("s4://bucket/text", "s4"), ("nowhere/text.txt", "does not exist"), (str(ROOT), "cannot be read")])
def test_a_place_that_cannot_be_read_is_named(url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_bytes(DataConfig(path=url))


def test_the_embedded_play_is_what_its_program_writes() -> None:
    done = subprocess.run([sys.executable, "data/make_corpus.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_floor_is_known_for_the_embedded_play_alone(tmp_path: Path) -> None:
    content, about = (ROOT / "data" / "input.txt").read_bytes(), json.loads((ROOT / "data" / "input.json").read_text())
    path = str(ROOT / "data" / "input.txt")
    assert prepare(content, DataConfig(path=path)).entropy_floor == about["val_nats_per_character"]
    assert prepare(content, DataConfig(path=path, val_fraction=0.2)).entropy_floor is None
    assert prepare(content[:-1], DataConfig(path=path)).entropy_floor is None


def test_the_floor_counts_every_choice_of_the_grammar() -> None:
    """An independent count: of equally likely options the surprisal of the whole choice is the log of their number."""
    sys.path.insert(0, str(ROOT / "data"))
    from make_corpus import Play, surprisals, write_play

    options = (("cat ", 1.0), ("car ", 1.0), ("dog ", 2.0))
    assert sum(surprisals(options, "cat ")) == pytest.approx(np.log(4)) and surprisals(options, "cat ")[1] == 0.0
    text, nats = write_play(5000, seed=1)
    assert len(text) == len(nats) == 5000 and min(nats) >= 0
    with pytest.raises(AssertionError, match="begins another"):
        Play(1).choose((("a", 1.0), ("ab", 1.0)))


SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare does not lie beside the project, and tests download nothing")
def test_the_shakespeare_configuration_asks_for_the_well_known_text() -> None:
    from mingpt.config import parse

    config = parse([str(ROOT / "configs" / "shakespeare_char.yaml"), f"data.path={SHAKESPEARE}"]).data
    corpus = prepare(read_bytes(config), config)  # its checksum is verified on the way
    assert len(corpus.vocabulary) == 65 and len(corpus.train.tokens) + len(corpus.val.tokens) == 1_115_394
