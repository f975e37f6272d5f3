import pytest
from torch.distributed import DistNetworkError

from mingpt.distributed.exit import is_lost_peer, is_timeout


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:27271",
        "Application timeout caused pair closure",
        "Connection reset by peer",
    ],
)
def test_what_gloo_says_of_a_lost_peer_is_understood(text: str) -> None:
    assert is_lost_peer(RuntimeError(text)) and not is_lost_peer(ValueError(text))


def test_another_error_is_no_lost_peer() -> None:
    assert not is_lost_peer(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert is_lost_peer(DistNetworkError("the client socket has failed"))


def test_a_timeout_is_told_from_a_closed_connection() -> None:
    assert is_timeout(RuntimeError("Timed out waiting 4000ms for recv operation to complete"))
    assert is_timeout(RuntimeError("Application timeout caused pair closure"))
    assert not is_timeout(RuntimeError("Connection closed by peer"))
