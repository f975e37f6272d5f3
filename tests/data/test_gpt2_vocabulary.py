import functools
import hashlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.vocabularies import GPT2_FILES, cl100k_like, gpt2, gpt2_content

from mingpt.base.errors import UserError
from mingpt.data import load_named_tokenizer, read_named_tokenizer, source

PAIRS = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with GPT-2's files at the address where `gpt2` is fetched, on a server of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    shutil.copytree(GPT2_FILES, folder)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(source, "GPT2_URL", f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()
        thread.join()


def test_gpt2_is_fetched_once_and_cached(served: Path) -> None:
    tokenizer = load_named_tokenizer("gpt2")
    assert tokenizer.to_bytes() == gpt2_content() and len(tokenizer) == 50257
    shutil.rmtree(served)
    assert load_named_tokenizer("gpt2").to_bytes() == gpt2_content()


def test_the_fixed_checksums_are_those_of_gpt2s_files() -> None:
    for name, sha256 in (source.GPT2_VOCAB, source.GPT2_MERGES):
        assert hashlib.sha256((GPT2_FILES / name).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_other_bytes_in_place_of_gpt2s_are_refused_and_not_cached(name: str, served: Path) -> None:
    right = (served / name).read_bytes()
    (served / name).write_bytes(right + b"\n")
    with pytest.raises(UserError) as error:
        load_named_tokenizer("gpt2", "--tokenizer")
    url = f"{source.GPT2_URL}/{name}"
    assert str(error.value).startswith(f"--tokenizer=gpt2: {url} has sha256 ")
    assert "its fixed checksum asks for 1" in str(error.value)
    (served / name).write_bytes(right)
    assert len(load_named_tokenizer("gpt2")) == 50257


def test_an_address_that_does_not_answer_is_one_sentence(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "GPT2_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(UserError) as error:
        load_named_tokenizer("gpt2")
    sentence = str(error.value)
    assert sentence.startswith("data.tokenizer=gpt2: http://127.0.0.1:9/encoder.json cannot be read: ")
    assert sentence.endswith(
        "; or name a folder with encoder.json and vocab.bpe, or a tokenizer.json, by path"
    )
    assert "\n" not in sentence


@pytest.mark.parametrize("names", PAIRS, ids=[names[0] for names in PAIRS])
def test_a_folder_with_gpt2s_two_files_is_that_tokenizer(names: tuple[str, str], tmp_path: Path) -> None:
    for original, name in zip(("encoder.json", "vocab.bpe"), names, strict=True):
        shutil.copy(GPT2_FILES / original, tmp_path / name)
    assert read_named_tokenizer(str(tmp_path)) == gpt2_content()
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match=rf"^data\.tokenizer .*/{names[1]} does not exist$"):
        load_named_tokenizer(str(tmp_path))


def test_a_tokenizer_json_is_read_from_a_path_a_folder_and_a_url(served: Path) -> None:
    content = cl100k_like("a text of some words")
    (served / "tokenizer.json").write_bytes(content)  # goes before the two files
    (served / "other.json").write_bytes(content)
    for name in (served, f"{served}/", served / "other.json", f"file://{served}", served / "tokenizer.json"):
        assert load_named_tokenizer(str(name)).to_bytes() == content
    url = source.GPT2_URL
    assert load_named_tokenizer(url).to_bytes() == content
    assert load_named_tokenizer(f"{url}/other.json?version=1").to_bytes() == content
    (served / "other.json").write_bytes(gpt2_content())  # without a checksum, nothing is cached
    assert len(load_named_tokenizer(f"{url}/other.json")) == len(gpt2())


def test_a_folder_without_tokenizer_says_what_may_lie_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError) as error:
            load_named_tokenizer(str(place), "--tokenizer")
        assert str(error.value) == (
            f"--tokenizer {place} is neither gpt2, nor a .json file, nor a folder with tokenizer.json, or "
            "vocab.json and merges.txt, or encoder.json and vocab.bpe"
        )


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a": "b", "c": 1}', '{"a": 0}'])
def test_files_of_another_form_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"^data\.tokenizer .* (has no vocabulary|cannot be used)"):
        load_named_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": content}))
    with pytest.raises(UserError, match=r"^data\.tokenizer .* cannot be used: this is no tokenizer\.json"):
        load_named_tokenizer(str(tmp_path / "tokenizer.json"))
