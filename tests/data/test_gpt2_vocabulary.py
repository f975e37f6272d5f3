import functools
import http.server
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.vocabularies import GPT2_FILES, cl100k_like, gpt2, gpt2_content
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.data import load_named_tokenizer, read_named_tokenizer


def test_gpt2_is_read_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_content())
    asked = []

    def download(*words: str, **options: str) -> str:
        asked.append((*words, len(options["revision"])))
        return str(tmp_path / "tokenizer.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(load_named_tokenizer("gpt2")) == 50257
    assert asked == [("openai-community/gpt2", "tokenizer.json", 40)]


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*words: str, **options: Any) -> str:
        raise FileNotFoundError("no connection\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    begin = r"^--tokenizer=gpt2 cannot be read from .*: FileNotFoundError: no connection; without a network, "
    with pytest.raises(UserError, match=begin):
        load_named_tokenizer("gpt2", "--tokenizer")


def test_a_folder_with_gpt2s_two_files_is_that_tokenizer(tmp_path: Path) -> None:
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(GPT2_FILES / name, tmp_path)
    assert read_named_tokenizer(f"{tmp_path}/") == gpt2_content()
    (tmp_path / "vocab.bpe").unlink()
    with pytest.raises(UserError, match=rf"^data\.tokenizer {tmp_path} is neither gpt2, nor "):
        load_named_tokenizer(str(tmp_path))


def test_a_tokenizer_json_is_read_from_a_path_a_folder_and_a_url(tmp_path: Path) -> None:
    content = cl100k_like("a text of some words")
    shutil.copytree(GPT2_FILES, tmp_path / "served")
    served = tmp_path / "served"
    (served / "tokenizer.json").write_bytes(content)  # is preferred to the two files
    (served / "other.json").write_bytes(content)
    for name in (served, f"{served}/", served / "other.json", f"file://{served}", served / "tokenizer.json"):
        assert load_named_tokenizer(str(name)).to_bytes() == content
    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))) as url:
        assert load_named_tokenizer(url).to_bytes() == content
        assert load_named_tokenizer(f"{url}/other.json?version=1").to_bytes() == content
        (served / "other.json").write_bytes(gpt2_content())  # nothing is cached
        assert len(load_named_tokenizer(f"{url}/other.json")) == len(gpt2())


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a": "b", "c": 1}', '{"a": 0}'])
def test_files_of_another_form_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text(content)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"^data\.tokenizer .* has no vocabulary of GPT-2's form: "):
        load_named_tokenizer(str(tmp_path))
