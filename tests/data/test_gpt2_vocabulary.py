import functools
import http.server
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.vocabularies import GPT2_FILES, cl100k_like, gpt2, gpt2_content
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.data import load_named_tokenizer, read_named_tokenizer, source

PAIRS = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with GPT-2's files, served by this machine at the address from which `gpt2` is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    shutil.copytree(GPT2_FILES, folder)
    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))) as url:
        monkeypatch.setattr(source, "GPT2_URL", url)
        yield folder


def test_gpt2_is_fetched_once_and_cached(served: Path) -> None:
    tokenizer = load_named_tokenizer("gpt2")
    assert tokenizer.to_bytes() == gpt2_content() and len(tokenizer) == 50257
    shutil.rmtree(served)
    assert load_named_tokenizer("gpt2").to_bytes() == gpt2_content()


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
    begin = r"^data\.tokenizer=gpt2: http://127\.0\.0\.1:9/encoder\.json cannot be read: "
    with pytest.raises(UserError, match=begin):
        load_named_tokenizer("gpt2")


@pytest.mark.parametrize("names", PAIRS, ids=[names[0] for names in PAIRS])
def test_a_folder_with_gpt2s_two_files_is_that_tokenizer(names: tuple[str, str], tmp_path: Path) -> None:
    for original, name in zip(("encoder.json", "vocab.bpe"), names, strict=True):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (GPT2_FILES / original).read_bytes())
    assert read_named_tokenizer(str(tmp_path)) == gpt2_content()
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match=rf"^data\.tokenizer .*/{names[1]} does not exist$"):
        load_named_tokenizer(str(tmp_path))


def test_a_tokenizer_json_is_read_from_a_path_a_folder_and_a_url(served: Path) -> None:
    content = cl100k_like("a text of some words")
    (served / "tokenizer.json").write_bytes(content)  # is preferred to the two files
    (served / "other.json").write_bytes(content)
    for name in (served, f"{served}/", served / "other.json", f"file://{served}", served / "tokenizer.json"):
        assert load_named_tokenizer(str(name)).to_bytes() == content
    url = source.GPT2_URL
    assert load_named_tokenizer(url).to_bytes() == content
    assert load_named_tokenizer(f"{url}/other.json?version=1").to_bytes() == content
    (served / "other.json").write_bytes(gpt2_content())  # without a checksum, nothing is cached
    assert len(load_named_tokenizer(f"{url}/other.json")) == len(gpt2())


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a": "b", "c": 1}', '{"a": 0}'])
def test_files_of_another_form_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"^data\.tokenizer .* (has no vocabulary|cannot be used)"):
        load_named_tokenizer(str(tmp_path))
