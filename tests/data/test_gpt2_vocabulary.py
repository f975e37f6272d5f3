import functools
import http.server
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.vocabularies import cl100k_like, gpt2, gpt2_content
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.data import load_named_tokenizer
from mingpt.data.json_tokenizer import GPT2_REVISION


def test_gpt2_is_read_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(gpt2_content())
    download = Mock(return_value=str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(load_named_tokenizer("gpt2")) == 50257
    download.assert_called_once_with("openai-community/gpt2", "tokenizer.json", revision=GPT2_REVISION)
    download.side_effect = FileNotFoundError("no connection\nand more")
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
