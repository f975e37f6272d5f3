"""Servers on this machine: of HTTP and of S3."""

import contextlib
import http.server
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest


@contextlib.contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the file system of a new S3 server, to which the environment leads the block's processes."""
    s3fs = pytest.importorskip("s3fs", reason="requirements-dev.txt installs it")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # Every server of a process has the same buckets, so earlier tests' buckets are still there.
        urllib.request.urlopen(f"{url}/moto-api/reset", data=b"").close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # an instance of another test has its server's address
        yield fsspec.filesystem("s3", use_listings_cache=False)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
