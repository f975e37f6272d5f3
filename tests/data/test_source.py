import errno
import functools
import hashlib
import http.server
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from support.faults import FaultyDisk
from support.web import serving

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import read_bytes

TEXT = "Où? Ça, la mer; 海と空。 ".encode() * 40


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an HTTP server on this machine that has one file, play.txt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "play.txt").write_bytes(TEXT)
    handler = http.server.SimpleHTTPRequestHandler
    with serving(functools.partial(handler, directory=str(tmp_path / "served"))) as url:
        yield url


def test_a_remote_text_is_cached_and_its_checksum_holds(
    served: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a checksum, a line says which copy is used."""
    config = DataConfig(path=f"{served}/play.txt", sha256=hashlib.sha256(TEXT).hexdigest())
    assert read_bytes(config) == TEXT
    (cached,) = (tmp_path / "cache" / "mingpt").iterdir()
    cached.write_bytes(b"torn")
    assert read_bytes(config) == TEXT and cached.read_bytes() == TEXT
    (tmp_path / "served" / "play.txt").unlink()
    caplog.set_level("INFO")
    assert read_bytes(config) == TEXT and caplog.messages == []
    assert read_bytes(DataConfig(path=config.path)) == TEXT
    (line,) = caplog.messages
    assert f"the copy of {datetime.now():%Y-%m-%d} " in line and f" in {cached} is used; remove" in line


def test_a_text_that_cannot_be_cached_is_used_all_the_same(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FaultyDisk(monkeypatch, "replace", str(tmp_path / "cache"), errno.ENOSPC)
    assert read_bytes(DataConfig(path=f"{served}/play.txt")) == TEXT
    (line,) = caplog.messages
    assert line.startswith(f"{served}/play.txt is not cached (")


class RefusingHandler(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names; closes the connection if the path names none."""

    def do_GET(self) -> None:
        if self.path[1:].isdigit():
            self.send_error(int(self.path[1:]))

    do_HEAD = do_GET


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("404", "404 does not exist"),
        ("403", "403 cannot be read: ClientResponseError: 403, message='Forbidden'"),
        ("500", "500 cannot be read: ClientResponseError: 500"),
        ("closed", "closed cannot be read: ServerDisconnectedError: "),
    ],
)
def test_a_server_that_gives_no_file_is_told_from_a_file_that_is_not_there(name: str, sentence: str) -> None:
    """The driver raises FileNotFoundError in all these cases."""
    with serving(RefusingHandler) as url, pytest.raises(UserError) as error:
        read_bytes(DataConfig(path=f"{url}/{name}"))
    assert str(error.value).startswith(f"data.path {url}/{sentence}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("{}/text", r"/text has sha256 982d.*, and data\.sha256 asks for 000"),
        ("s4://bucket/text", "s4"),
        ("nowhere/text.txt", rf"does not exist \(relative paths start at {Path.cwd()}\)$"),
        ("{}", "cannot be read"),
        ("{}/loop", r"/loop cannot be read: Too many levels of symbolic links$"),
        ("{}/pipe", r"/pipe is a named pipe: write its content to a file$"),
        ("file://{}/pipe", r"/pipe is a named pipe: write its content to a file$"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(url: str, sentence: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text").write_bytes(b"text")
    with pytest.raises(UserError, match=sentence):
        read_bytes(DataConfig(path=url.format(tmp_path), sha256="0" * 64))
