"""Credentials in URLs are hidden wherever URLs are shown; nothing prints the environment."""

from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import Start, command, torchrun
from support.properties import examples
from support.web import serving

from mingpt.base.urls import redact

WORD = "hunter2"  # occurs in every secret below
SECRETS = {"SECRET_TOKEN": f"{WORD}-token", "AWS_SECRET_ACCESS_KEY": f"{WORD}-aws", "HF_TOKEN": f"{WORD}-hf"}
NAMES = st.text("abcXYZ019._~%-", min_size=1, max_size=8)
PATHS = st.text("abc09._-/*", max_size=12)
PASSWORDS = st.text("abc019:@!$&*+,;=%()[]~^|'", min_size=1, max_size=12)
QUERIES = st.text("abc019:@/?!$&=%+#", max_size=20)


@pytest.mark.parametrize(
    ("shown", "url"),
    [
        ("https://***@host/a", "https://hunter2@host/a"),
        ("abfs://container@account.net/a", "abfs://container@account.net/a"),
        ("s3://bucket/shard-?.bin", "s3://bucket/shard-?.bin"),
        ("data/input.txt", "data/input.txt"),
    ],
)
def test_a_token_is_hidden_and_what_is_no_credential_is_kept(shown: str, url: str) -> None:
    assert (
        redact(f"data.path {url} is no text: Error('{url}')")
        == f"data.path {shown} is no text: Error('{shown}')"
    )


@examples(100)
@given(
    st.sampled_from(["https", "sftp", "simplecache::https"]), NAMES, PASSWORDS, NAMES, PATHS, NAMES, QUERIES
)
def test_any_password_and_any_signed_query_are_hidden_and_the_rest_is_kept(
    scheme: str, user: str, password: str, host: str, path: str, key: str, query: str
) -> None:
    url, shown = f"{scheme}://{user}:{password}@{host}/{path}", f"{scheme}://{user}:***@{host}/{path}"
    assert redact(url) == redact(shown) == shown
    said, signed = "\"{0}\" cannot be read: Error('{0}') at {0}".format, f"?{key}={query}"
    assert redact(said(url + signed)) == said(f"{shown}?***")


@pytest.mark.weekly
def test_no_secret_reaches_the_terminal_or_any_file(start: Start, text: Path, tmp_path: Path) -> None:
    """The secrets are in the environment and in data.path; the files that are searched include the cache."""
    env = {**SECRETS, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    memory: dict[str, Any] = {"snapshot__memory_path": tmp_path / "memory", "trainer__max_steps": 6}
    (tmp_path / "memory").mkdir()
    with serving(partial(SimpleHTTPRequestHandler, directory=str(text.parent))) as server:
        host = server.replace("//", f"//me:{WORD}-url@")
        url = f"{host}/{text.name}?X-Amz-Signature={WORD}-signature"
        run = command(launcher=torchrun(2), run_dir=tmp_path / "run", data__path=url, **memory)
        first = start(run, **env)
        assert first.wait() == 0, first.err()
        again = start(run, **env)  # the redacted path is not taken for another path
        assert again.wait() == 0 and "already stands at step 6" in again.err()
        doctor = start(
            command("-m", "mingpt", "doctor", program="-u", run_dir=tmp_path / "run", data__path=url), **env
        )
        assert doctor.wait() == 0, doctor.out()
        absent = url.replace("play.txt", "absent.txt")
        wrong = start(command(run_dir=tmp_path / "wrong", data__path=absent, trainer__workers=1), **env)
        assert wrong.wait() == 2 and "error: data.path http://me:***@127.0.0.1" in wrong.err()
    for job in (first, again, doctor, wrong):
        assert WORD not in job.out() + job.err()
    for path in tmp_path.rglob("*"):
        assert WORD not in path.name and not (path.is_file() and WORD.encode() in path.read_bytes()), path
    assert "http://me:***@127.0.0.1" in (tmp_path / "run" / "config.yaml").read_text()
