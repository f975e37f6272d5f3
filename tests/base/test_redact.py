"""Credentials in URLs are hidden wherever URLs are shown; nothing prints the environment."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, command

from mingpt.base.urls import redact
from mingpt.tools.jobs import torchrun

WORD = "hunter2"  # occurs in every secret below
SECRETS = {"SECRET_TOKEN": f"{WORD}-token", "AWS_SECRET_ACCESS_KEY": f"{WORD}-aws", "HF_TOKEN": f"{WORD}-hf"}


@pytest.mark.parametrize(
    ("shown", "url"),
    [
        ("sftp://me:***@host/a", "sftp://me:hunter2@host/a"),
        ("sftp://me:***@host/a", "sftp://me:hun@ter2@host/a"),
        ("https://***@host/a", "https://hunter2@host/a"),
        ("https://me:***@host:80/a?***", "https://me:hunter2@host:80/a?X-Amz-Signature=hunter2&b=1"),
        ("simplecache::https://host/a?***", "simplecache::https://host/a?sig=hunter2"),
        ("abfs://container@account.net/a", "abfs://container@account.net/a"),
        ("s3://bucket/shard-?.bin", "s3://bucket/shard-?.bin"),
        ("data/input.txt", "data/input.txt"),
    ],
)
def test_credentials_are_hidden_and_the_rest_is_kept(shown: str, url: str) -> None:
    assert redact(url) == shown
    assert redact(f"data.path {url} cannot be read: Error('{url}')") == (
        f"data.path {shown} cannot be read: Error('{shown}')"
    )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(text: Path) -> Iterator[str]:
    """Serve the play; yields its URL with a password and a signature in it."""
    serving = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(text.parent)))
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://me:{WORD}-url@127.0.0.1:{serving.server_port}/{text.name}?X-Amz-Signature={WORD}-signature"
    serving.shutdown()
    serving.server_close()


def files_with(word: str, *folders: Path) -> list[str]:
    """The names of files whose name or content has this word."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    named = [str(path) for path in paths if word in path.name]
    return named + [str(path) for path in paths if path.is_file() and word.encode() in path.read_bytes()]


@pytest.mark.weekly
def test_no_secret_reaches_the_terminal_or_any_file(start: Start, server: str, tmp_path: Path) -> None:
    """The secrets are in the environment and in data.path; the files that are searched include the cache."""
    env = {**SECRETS, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    memory: dict[str, Any] = {"snapshot__memory_path": tmp_path / "memory", "trainer__max_steps": 6}
    (tmp_path / "memory").mkdir()
    run = command(launcher=torchrun(2), run_dir=tmp_path / "run", data__path=server, **memory)
    first = start(run, **env)
    assert first.wait() == 0, first.err()
    again = start(run, **env)  # the redacted path is not taken for another path
    assert again.wait() == 0 and "already stands at step 6" in again.err()
    doctor = start(
        command("-m", "mingpt", "doctor", program="-u", run_dir=tmp_path / "run", data__path=server), **env
    )
    assert doctor.wait() == 0, doctor.out()
    absent = server.replace("play.txt", "absent.txt")
    wrong = start(command(run_dir=tmp_path / "wrong", data__path=absent, trainer__workers=1), **env)
    assert wrong.wait() == 2 and "error: data.path http://me:***@127.0.0.1" in wrong.err()
    for job in (first, again, doctor, wrong):
        assert WORD not in job.out() + job.err()
    assert files_with(WORD, tmp_path) == []
    assert "http://me:***@127.0.0.1" in (tmp_path / "run" / "config.yaml").read_text()
