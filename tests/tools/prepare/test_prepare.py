"""The command as users run it: shards, split, formats of text, and the same bytes every time."""

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.needs import need_proc
from support.prepared import END, digests, mixed, prepared, read_meta, run_apart, tokens_of, write_documents
from tokenizers import Tokenizer as PackageTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from mingpt.data import CharTokenizer, JsonTokenizer
from mingpt.tools.prepare import documents
from mingpt.tools.prepare.job import train_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BPE that has learned runs of whitespace, which wrong cuts would break."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "a.txt").write_bytes(mixed(200_000, 0).encode())
    prepared(folder / "a.txt", "--out", folder / "out", "--tokenizer", "bpe", "--vocab_size", 400)
    return folder / "out"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text is read, cut and encoded as a long one."""
    monkeypatch.setattr(documents, "PIECE_BYTES", 500)
    monkeypatch.setattr(documents, "BATCH_BYTES", 6000)


def expected(path: Path, documents: list[str]) -> list[int]:
    """The tokens of whole documents by the package alone."""
    package = PackageTokenizer.from_file(str(path))
    package.encode_special_tokens = True
    end: list[int] = [package.token_to_id(END) or 0]
    encodings = package.encode_batch_fast(documents, add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids + end]


def test_characters_of_one_text_are_split_as_training_splits_them(tmp_path: Path) -> None:
    text = mixed(30_000, 1)
    (tmp_path / "a.txt").write_bytes(text.encode())
    out = tmp_path / "out"
    line = prepared(tmp_path / "a.txt", "--out", out, "--val_fraction", 0.2, "--shard_tokens", 7000)
    tokenizer = CharTokenizer.train(text)
    n_train = int(30_000 * 0.8)
    assert tokens_of(out, "train") == tokenizer.encode(text[:n_train]).tolist()
    assert tokens_of(out, "val") == tokenizer.encode(text[n_train:]).tolist()
    meta = read_meta(out)
    assert [file["tokens"] for file in meta["files"]] == [7000, 7000, 7000, 3000, 6000]
    assert meta["val_bytes"] == len(text[n_train + 1 :].encode())
    assert (meta["tokenizer"]["end_of_text"], meta["tokenizer"]["vocab_size"]) == (None, len(tokenizer))
    assert (out / "tokenizer.json").read_bytes() == tokenizer.to_tokenizer_json()
    assert "30,000 tokens" in line and line.endswith(f"vocabulary of {len(tokenizer)}, 1 document, 5 files\n")


def test_chunks_of_a_long_text_have_the_tokens_of_the_whole(
    bpe: Path, tmp_path: Path, small_pieces: None
) -> None:
    """In many reads, pieces, batches and shards."""
    text = mixed(100_000, 2)
    (tmp_path / "a.txt").write_bytes(text.encode())
    out, tokenizer = tmp_path / "out", bpe / "tokenizer.json"
    prepared(tmp_path / "a.txt", "--out", out, "--tokenizer", tokenizer, "--shard_tokens", 3_001)
    n_train = 90_000
    train, val = (expected(tokenizer, [part]) for part in (text[:n_train], text[n_train:]))
    assert tokens_of(out, "train") == train[:-1]  # the document goes on
    assert tokens_of(out, "val") == val
    first = int(JsonTokenizer(tokenizer.read_bytes()).token_bytes()[val[0]])  # type: ignore[index]
    assert read_meta(out)["val_bytes"] == len(text[n_train:].encode()) - first


def test_documents_end_with_end_of_text_and_are_never_cut(
    bpe: Path, tmp_path: Path, small_pieces: None
) -> None:
    """A .jsonl, a compressed one, a text and a parquet file, by names and patterns."""
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(3)
    documents = [mixed(rng.choice([0, 1, 50, 3000]), seed) for seed in range(400)]
    documents[370] = mixed(200_000, 5)
    write_documents(tmp_path / "1.jsonl", documents[:100])
    with gzip.open(tmp_path / "2.jsonl.gz", "wt", encoding="utf-8", newline="") as file:
        file.write("\n\n".join(json.dumps({"text": text}) for text in documents[100:199]))
    documents[199] = mixed(50, 199)
    (tmp_path / "3.txt").write_bytes(documents[199].encode())
    table = pyarrow.table({"text": documents[200:], "url": ["u"] * 200})
    parquet.write_table(table, tmp_path / "4.parquet", row_group_size=30)
    out = tmp_path / "out"
    names = [tmp_path / "*.jsonl*", f"file://{tmp_path}/3.txt", f"file://{tmp_path}/*.parquet"]
    prepared(*names, "--out", out, "--tokenizer", bpe / "tokenizer.json", "--shard_tokens", 50_000)
    meta = read_meta(out)
    sizes = [len(text.encode()) for text in documents]
    border = next(n for n in range(400) if sum(sizes[:n]) >= int(sum(sizes) * 0.9))
    assert meta["documents"] == {"train": border, "val": 400 - border}
    assert tokens_of(out, "train") == expected(out / "tokenizer.json", documents[:border])
    assert tokens_of(out, "val") == expected(out / "tokenizer.json", documents[border:])


@pytest.mark.parametrize("loses_text", [False, True])
def test_a_text_of_one_piece_is_encoded_as_a_whole_by_any_tokenizer(loses_text: bool, tmp_path: Path) -> None:
    """With a normalizer the bytes of validation are counted in the source, unless some of it is lost."""
    text = mixed(40_000, 6)
    (tmp_path / "a.txt").write_bytes(text.encode())
    package = PackageTokenizer(models.BPE(unk_token="?"))
    package.normalizer = normalizers.NFKC() if loses_text else normalizers.NFC()
    package.pre_tokenizer, package.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    package.train_from_iterator(
        [text.replace(END, "")],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], initial_alphabet=[*END]),
    )
    package.add_special_tokens([END])
    package.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    prepared(tmp_path / "a.txt", "--out", out, "--tokenizer", tmp_path / "tokenizer.json")
    parts = text[:36_000], text[36_000:]
    assert tokens_of(out, "train") == expected(tmp_path / "tokenizer.json", [parts[0]])[:-1]
    assert tokens_of(out, "val") == expected(tmp_path / "tokenizer.json", [parts[1]])
    end = package.encode(parts[1]).offsets[0][1]
    assert read_meta(out)["val_bytes"] == (None if loses_text else len(parts[1][end:].encode()))


@pytest.mark.slow
def test_own_bpe_is_the_same_with_one_thread_and_trains_on_no_validation(tmp_path: Path) -> None:
    """All files are, from training to shards."""
    words, bpe = ["--tokenizer", "bpe", "--vocab_size", 400], tmp_path / "bpe"
    prepared(ROOT / "data/input.txt", "--out", bpe, *words)
    one = ["--out", tmp_path / "one"]
    assert run_apart(ROOT / "data/input.txt", *one, *words, RAYON_NUM_THREADS="1").returncode == 0
    assert digests(tmp_path / "one") == digests(bpe)
    assert read_meta(bpe)["tokenizer"]["vocab_size"] == 400
    text = (ROOT / "data/input.txt").read_text()
    (tmp_path / "other.txt").write_text(text[:900_000] + "".join(random.Random(0).sample(text, 100_000)))
    prepared(tmp_path / "other.txt", "--out", tmp_path / "other", *words)
    assert digests(tmp_path / "other")["tokenizer.json"] == digests(bpe)["tokenizer.json"]
    assert digests(tmp_path / "other")["val_00000.bin"] != digests(bpe)["val_00000.bin"]


def test_a_vocabulary_past_65536_takes_four_bytes_a_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "".join(map(chr, range(0x20, 0xD800))) + "".join(map(chr, range(0x10000, 0x18000)))
    )
    prepared(tmp_path / "a.txt", "--out", tmp_path / "out")
    count = 0xD800 - 0x20 + 0x8000
    assert tokens_of(tmp_path / "out", "train") + tokens_of(tmp_path / "out", "val") == list(range(count))


@pytest.mark.parametrize("alphabet", ["abcdefgh", " "])
def test_a_bpe_of_a_text_without_words_is_trained_in_time(alphabet: str) -> None:
    # A merge takes time in proportion to the longest word, and here the whole text is one.
    letters = random.Random(0).choices(alphabet, k=1_000_000)
    train_bpe(400, [documents.Piece("".join(letters), True)])


def test_a_bpe_of_words_up_to_256_characters_is_that_of_gpt2s_pattern() -> None:
    # And the file says that pattern, whatever it was trained with.
    text = mixed(100_000, 3) + "x" * 256 + " " * 256 + "1" * 256 + "." * 256 + "\n" * 256
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package = PackageTokenizer(models.BPE())
    package.pre_tokenizer, package.decoder = byte_level, decoders.ByteLevel()
    package.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=399, initial_alphabet=byte_level.alphabet())
    )
    package.add_special_tokens([END])
    assert train_bpe(400, [documents.Piece(text, True)]).decode() == package.to_str(pretty=True)


@pytest.mark.slow
def test_memory_stays_below_a_gigabyte_where_every_byte_is_a_token(tmp_path: Path) -> None:
    """Lines that are all different, in a script of three bytes a character, and no merges to speak of."""
    need_proc()
    rng = random.Random(0)
    lines = ("".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(40)) + "\n" for _ in range(200_000))
    (tmp_path / "a.txt").write_text("".join(lines))
    words = [tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bpe", "--vocab_size", 300]
    # ru_maxrss would begin with the size of the process that started it.
    peak = (
        "import atexit; atexit.register(lambda: print(open('/proc/self/status').read().split('VmHWM:')[1]))"
    )
    done = run_apart(*words, before=peak)
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"^\s*(\d+) kB", done.stdout, re.MULTILINE)[0]) * 1024 < 10**9


def test_torch_is_not_imported() -> None:
    """It takes a second and, with CUDA, half a gigabyte; the command promises to stay below one."""
    program = "import sys, mingpt.tools.prepare.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
