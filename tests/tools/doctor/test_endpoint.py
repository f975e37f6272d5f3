"""What answers at a meeting point, told apart by trying it."""

import socketserver
import threading

import pytest
from support.jobs import free_port

from mingpt.base.errors import UserError
from mingpt.launch.elastic.boards import Server
from mingpt.launch.elastic.node import Node
from mingpt.tools.doctor.network import check_endpoint


def test_a_store_of_torch_is_recognised_also_as_the_only_good_one_of_a_list() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_good, (line,) = check_endpoint(f"127.0.0.1:{store.port}")
    assert is_good and "a store of torch answers" in line and "reached from 127.0.0.1" in line
    where = f"127.0.0.1:{free_port()},no-such-host.invalid:29400"
    is_good, (refused, unknown) = check_endpoint(where)
    assert not is_good and "connection refused" in refused and "nothing listens" in refused
    assert "does not resolve" in unknown
    assert check_endpoint(f"{where},127.0.0.1:{store.port}")[0]


def test_an_agent_is_recognised() -> None:
    server = Server("127.0.0.1", 0, Node("node1", "127.0.0.1", 1).operations())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    is_good, (line,) = check_endpoint(f"127.0.0.1:{server.port}")
    assert is_good and "an agent of mingpt.launch.elastic answers" in line


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n", b'{"error": "KeyError"}\n'])
def test_another_program_is_told_by_what_it_says(says: bytes) -> None:
    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(says)

    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        is_good, (line,) = check_endpoint(f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert not is_good and "a frozen agent, has port" in line and says[:8].decode() in line


@pytest.mark.parametrize("where", ["node1", ":29400", "node1:port", "node1:70000"])
def test_what_is_no_host_and_port_is_an_error(where: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        check_endpoint(where)
