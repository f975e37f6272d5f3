"""Requests have time limits, servers survive invalid requests, and boards hold the latest posts."""

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from anynode import boards
from anynode.boards import BoardMemory, FolderBoard, HostBoard, Server, parse_rdzv, request
from anynode.decisions import FINISHED, Entry

HERE = "127.0.0.1"


def entry(name: str, counter: int = 1) -> Entry:
    return Entry(id=name, host=f"host-{name}", address=HERE, port=1, counter=counter, reach=("x",))


@pytest.fixture
def port() -> int:
    server = Server(
        HERE,
        0,
        {"post": BoardMemory().post, "ping": lambda message: {"id": "me"}, "first": lambda message: [][0]},
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.port


def test_a_server_answers_and_survives_nonsense(port: int) -> None:
    assert request(HERE, port, {"op": "ping"}, 2) == {"id": "me"}
    for nonsense in (
        b"\n",
        b"{\n",
        b"[]\n",
        b'{"op": "none"}\n',
        b'{"op": []}\n',
        b'{"op": "first"}\n',  # of a list without members
        b"\x80\x04K\x01.\n",
        b"\xff\n",
        b"[" * 100_000 + b"\n",
    ):
        with socket.create_connection((HERE, port), 2) as connection:
            connection.sendall(nonsense)
            assert "error" in json.loads(connection.makefile().readline())
    with socket.create_connection((HERE, port), 2):
        pass  # the client hangs up
    assert request(HERE, port, {"op": "ping"}, 2) == {"id": "me"}


def test_a_silent_server_costs_the_time_limit_and_no_more() -> None:
    with socket.socket() as listener:
        listener.bind((HERE, 0))
        listener.listen()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            request(HERE, listener.getsockname()[1], {"op": "ping"}, 0.2)
        assert time.monotonic() - began < 2


def test_a_host_board_holds_the_latest_entries_of_each_job(port: int) -> None:
    mine, other = HostBoard(HERE, port, "mine"), HostBoard(HERE, port, "other")
    assert mine.exchange(entry("a")) == [entry("a")]
    assert other.exchange(entry("b")) == [entry("b")]
    assert mine.exchange(entry("a", 2)) == [entry("a", 2)]
    assert sorted(found.id for found in mine.exchange(entry("c"))) == ["a", "c"]


def test_a_folder_board_holds_a_file_for_each_agent_and_no_more(tmp_path: Path) -> None:
    board, elsewhere = FolderBoard(tmp_path / "deep", "job/1"), FolderBoard(tmp_path / "deep", "job/2")
    elsewhere.exchange(entry("z"))
    for counter in range(1, 20):
        board.exchange(entry("a", counter))
    found = board.exchange(entry("b"))
    assert sorted(found, key=lambda one: one.id) == [entry("a", 19), entry("b")]
    folder = tmp_path / "deep" / "job%2F1"
    assert sorted(os.listdir(folder)) == ["a.json", "b.json"]
    (folder / "c.json").write_text('{"id": "c", "later": true}')
    (folder / "d.json").write_bytes(b"\x80\x04")
    (folder / "mine.json").write_text("mine")
    os.utime(folder / "mine.json", (0, 0))
    (folder / "e.json").mkdir()  # reading it fails, as with a stale NFS handle
    assert len(board.exchange(entry("b", 2))) == 2 and (folder / "mine.json").exists()


def test_the_place_to_meet_is_a_folder_or_a_list_of_hosts() -> None:
    assert parse_rdzv("n1:29400, [fd00::1]:5,10.0.0.1:6") == [("n1", 29400), ("fd00::1", 5), ("10.0.0.1", 6)]
    assert parse_rdzv("[fe80::1%lo]:29400") == [("fe80::1%lo", 29400)]
    assert parse_rdzv("./meet") == Path.cwd() / "meet"
    assert parse_rdzv("/shared/a,b") == Path("/shared/a,b")
    for wrong in (
        "",
        "node1",
        "node1:",
        "node1:0",
        "node1:70000",
        "a:1,b",
        "::1",
        "a..b:1",
        ".a:1",
        "x" * 64 + ":1",
        "http://node1:29400",
    ):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_rdzv(wrong)


def test_boards_forget_killed_agents_and_keep_the_news_that_a_job_is_finished(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boards, "FORGET_S", 0.2)
    finished = dataclasses.replace(entry("a"), state=FINISHED)
    for board in (HostBoard(HERE, port, "finished"), FolderBoard(tmp_path, "job")):
        board.exchange(finished)
        board.exchange(entry("killed"))
        board.exchange(entry("b", 1))
        time.sleep(0.3)  # until the entry expires
        board.exchange(entry("b", 2))
        assert sorted(found.id for found in board.exchange(entry("b", 3))) == ["a", "b"]
