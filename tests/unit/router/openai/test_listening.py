"""Of two processes that bind one address at one moment, one listens."""

from __future__ import annotations

import socket

import pytest

from tercet.protocol import BadRequest
from tercet.router.openai.openai_server import listen_alone


def bound(port: int) -> socket.socket:
    """As vLLM binds."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def test_whoever_comes_too_late_is_told() -> None:
    with bound(0) as first:
        port = first.getsockname()[1]
        second = bound(port)
        listen_alone(first)
        with pytest.raises(BadRequest, match=f"127.0.0.1:{port}: Address already in use") as refused:
            listen_alone(second)
        assert refused.value.param == "port"
        assert second.fileno() == -1
