"""Errors of connections, as clients and operators read them."""

from __future__ import annotations

import errno
import socket
import ssl
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from tercet.wire.client.bounded_answers import reason_of

KEY: Any = cast(Any, SimpleNamespace(host="10.0.0.1", port=8001, ssl=True, is_ssl=True))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 8001)")),
         "Connection refused"),
        (aiohttp.ClientConnectorError(KEY, socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
         "cannot resolve its host name"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError("no")), "TLS: no secure connection"),
        (aiohttp.ServerTimeoutError(), "it took too long"),
        (TimeoutError(), "it took too long"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "Connection reset by peer"),
        (aiohttp.ServerDisconnectedError(), "it closed the connection"),
        (aiohttp.ClientPayloadError("Response payload is not completed"), "Response payload is not completed"),
    ],
)  # fmt: skip
def test_reasons(error: BaseException, said: str) -> None:
    assert reason_of(error) == said


async def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as failed:
                await session.get(f"http://127.0.0.1:{sock.getsockname()[1]}/")
    assert reason_of(failed.value) == "Connection refused"
