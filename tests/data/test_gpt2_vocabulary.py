import functools
import http.server
from pathlib import Path
from typing import Any

import pytest
from support.vocabularies import cl100k_like, gpt2, gpt2_content
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.data import load_named_tokenizer


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


def test_a_tokenizer_json_is_read_from_a_path_a_folder_and_a_url(tmp_path: Path) -> None:
    content = cl100k_like("a text of some words")
    served = tmp_path / "served"
    served.mkdir()
    (served / "tokenizer.json").write_bytes(content)
    (served / "other.json").write_bytes(content)
    for name in (served, f"{served}/", served / "other.json", f"file://{served}", served / "tokenizer.json"):
        assert load_named_tokenizer(str(name)).to_bytes() == content
    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))) as url:
        assert load_named_tokenizer(url).to_bytes() == content
        assert load_named_tokenizer(f"{url}/other.json?version=1").to_bytes() == content
        (served / "other.json").write_bytes(gpt2_content())  # nothing is cached
        assert len(load_named_tokenizer(f"{url}/other.json")) == len(gpt2())
    with pytest.raises(UserError, match=rf"^data\.tokenizer {tmp_path} is neither gpt2, nor .*prepare"):
        load_named_tokenizer(str(tmp_path))
