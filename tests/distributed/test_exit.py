import pytest
from torch.distributed import DistNetworkError

from mingpt.distributed.exit import is_lost_peer, is_timeout


@pytest.mark.parametrize(
    ("error", "is_loss", "is_time"),
    [
        (RuntimeError("[tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:27271"), True, False),
        (RuntimeError("Connection reset by peer"), True, False),
        (RuntimeError("Application timeout caused pair closure"), True, True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms"), True, True),
        (DistNetworkError("the client socket has failed"), True, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, False),
        (ValueError("Connection closed by peer"), False, False),
    ],
)
def test_what_gloo_says_of_a_lost_peer_is_understood(error: Exception, is_loss: bool, is_time: bool) -> None:
    assert is_lost_peer(error) == is_loss and is_timeout(error) == is_time
