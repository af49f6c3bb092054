"""An upload to S3 that takes longer than an answer may take is stored all the same."""

import contextlib
import socket
import threading
import time

import pytest

from diloco.common.storage.store import open_store

SIZE = 6 << 20


@pytest.fixture
def slow_server():
    """Reads a piece at a time, and stores what it has read; serves one request."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve():
        with contextlib.suppress(OSError):
            while not stop.is_set():
                peer, _ = listener.accept()
                with peer:
                    answer(peer)

    def answer(peer):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        read, head = 0, b""
        while b"\r\n\r\n" not in head:
            if not (piece := peer.recv(1 << 12)):
                return
            head += piece
        read = len(head.split(b"\r\n\r\n", 1)[1])
        while read < SIZE:
            if not (piece := peer.recv(1 << 17)):
                return
            read += len(piece)
            time.sleep(0.05)
        peer.sendall(
            b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n'
        )

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop.set()
    listener.close()


def test_an_upload_takes_as_long_as_the_link_needs(slow_server, monkeypatch):
    s3_azure = pytest.importorskip("diloco.common.storage.store.s3_azure")
    monkeypatch.setattr(s3_azure, "_ANSWER", {"read_timeout": "1s"})
    for name, value in {
        "AWS_ENDPOINT": slow_server, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "here", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket/prefix")
    began_s = time.monotonic()
    store.put("object", bytes(SIZE))
    assert time.monotonic() - began_s > 1.5
