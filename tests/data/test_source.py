import errno
import functools
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from support.faults import FaultyDisk

from mingpt.base.errors import UserError
from mingpt.config import DataConfig
from mingpt.data import read_bytes
from mingpt.data.source import hint_to_prepare

TEXT = "Où? Ça, la mer; 海と空。 ".encode() * 40


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an HTTP server on this machine, with one file, play.txt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "play.txt").write_bytes(TEXT)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_remote_text_is_cached_and_its_checksum_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zip archive stands for the remote place: another fsspec driver, no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("play.txt", TEXT)
    digest = hashlib.sha256(TEXT).hexdigest()
    url = f"zip://play.txt::file://{tmp_path}/texts.zip"
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT
    (cached,) = (tmp_path / "cache" / "mingpt").iterdir()
    cached.write_bytes(b"torn")
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT
    assert cached.read_bytes() == TEXT
    (tmp_path / "texts.zip").unlink()
    assert read_bytes(DataConfig(path=url, sha256=digest)) == TEXT
    with pytest.raises(UserError, match=r"cannot be read|does not exist"):
        read_bytes(DataConfig(path=url, sha256="0" * 64))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("function", ["mkdir", "fsync", "replace"])
def test_a_text_that_cannot_be_cached_is_used_all_the_same(
    function: str,
    code: int,
    served: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FaultyDisk(monkeypatch, function, str(tmp_path / "cache"), code)
    url = f"{served}/play.txt"
    assert read_bytes(DataConfig(path=url)) == TEXT
    (line,) = caplog.messages
    assert line.startswith(f"{url} is not cached ([Errno {code}] ")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    disk.broken = False
    assert read_bytes(DataConfig(path=url)) == TEXT
    assert len([path for path in (tmp_path / "cache").rglob("*") if path.is_file()]) == 1


def test_a_cached_text_that_cannot_be_read_is_downloaded_again(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{served}/play.txt"
    read_bytes(DataConfig(path=url))
    (cached,) = (tmp_path / "cache" / "mingpt").iterdir()
    (tmp_path / "served" / "play.txt").write_bytes(b"another text")

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        assert read_bytes(DataConfig(path=url)) == b"another text"
    assert cached.read_bytes() == b"another text"


class RefusingHandler(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names; closes the connection where it names none."""

    def do_GET(self) -> None:
        if self.path[1:].isdigit():
            self.send_response(int(self.path[1:]))
            self.send_header("Content-Length", "0")
            self.end_headers()
        self.close_connection = True

    do_HEAD = do_GET


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("404", "404 does not exist"),
        ("403", "403 cannot be read: ClientResponseError: 403, message='Forbidden'"),
        ("500", "500 cannot be read: ClientResponseError: 500"),
        ("closed", "closed cannot be read: ServerDisconnectedError: "),
        (None, "play cannot be read: ClientConnectorError: Cannot connect to host 127.0.0.1:"),
    ],
)
def test_a_server_that_gives_no_file_is_told_from_a_file_that_is_not_there(
    name: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver raises FileNotFoundError for all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), RefusingHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        if name is None:
            server.shutdown()
            server.server_close()
        with pytest.raises(UserError) as error:
            read_bytes(DataConfig(path=f"{url}/{name or 'play'}"))
        server.shutdown()
        thread.join()
    assert str(error.value).startswith(f"data.path {url}/{sentence}")
    assert "\n" not in str(error.value)


def test_a_relative_path_that_does_not_exist_says_where_it_starts() -> None:
    with pytest.raises(UserError) as error:
        read_bytes(DataConfig(path="nowhere/text.txt"))
    sentence = f"data.path nowhere/text.txt does not exist (relative paths start at {Path.cwd()})"
    assert str(error.value) == sentence


def test_another_checksum_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.sha256 asks for 000"):
        read_bytes(DataConfig(path=str(ROOT / "data" / "input.txt"), sha256="0" * 64))


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s4://bucket/text", "s4"),
        ("nowhere/text.txt", "does not exist"),
        (str(ROOT), "cannot be read"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_bytes(DataConfig(path=url))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL.gz", "a.parquet", "text.txt.gz", "a.zst"])
def test_files_that_prepare_reads_and_training_does_not_point_to_it(name: str) -> None:
    for path in (name, f"/data/{name}", f"https://host/{name}?version=1.txt"):
        assert hint_to_prepare(path) == ": make token shards of it with `python -m mingpt prepare`"
    assert hint_to_prepare(f"{name}.txt") == ""
