import functools
import hashlib
import http.server
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import read_bytes

TEXT = "Où? Ça, la mer; 海と空。 ".encode() * 40


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "play.txt").write_bytes(TEXT)
    handler = http.server.SimpleHTTPRequestHandler
    with serving(functools.partial(handler, directory=str(tmp_path / "served"))) as url:
        yield url


def test_a_remote_text_is_cached_and_its_checksum_holds(served: str, tmp_path: Path) -> None:
    config = DataConfig(path=f"{served}/play.txt", sha256=hashlib.sha256(TEXT).hexdigest())
    assert read_bytes(config) == TEXT
    (cached,) = (tmp_path / "cache" / "mingpt").iterdir()
    cached.write_bytes(b"torn")
    assert read_bytes(config) == TEXT and cached.read_bytes() == TEXT
    (tmp_path / "served" / "play.txt").unlink()
    assert read_bytes(config) == TEXT and read_bytes(DataConfig(path=config.path)) == TEXT


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("{}/text", r"/text has sha256 982d.*, and data\.sha256 asks for 000"),
        ("s4://bucket/text", "s4"),
        ("nowhere/text.txt", rf"does not exist \(relative paths start at {Path.cwd()}\)$"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(url: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text")
    with pytest.raises(UserError, match=sentence):
        read_bytes(DataConfig(path=url.format(tmp_path), sha256="0" * 64))
