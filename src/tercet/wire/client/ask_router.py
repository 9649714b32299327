"""Calls of a router's admin API."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from tercet.protocol import EngineNotReached, EngineUnreachable, from_wire
from tercet.protocol.access import bearer
from tercet.protocol.wire import API_PREFIX, UNREADABLE
from tercet.wire.client.bounded_answers import PLAIN, read_answer
from tercet.wire.client.connection_errors import reason_of

# Adding an engine waits for the engine's answer, and loading a program for the user's module.
CHANGE_ANSWER = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
READ_ANSWER = aiohttp.ClientTimeout(total=20.0, sock_connect=5.0)


async def ask_router(
    url: str, method: str, path: str, body: Any = None, admin_key: str = "", checks_certificate: bool = True
) -> Any:
    """Return the router's JSON answer to ``method`` on ``/tercet/v1`` + ``path``.

    Raises the :class:`~tercet.protocol.TercetError` in the answer, and :class:`~tercet.protocol.EngineUnreachable` if
    no router answers there: :class:`~tercet.protocol.EngineNotReached` if the call was certainly not sent.
    """
    headers = {"content-type": "application/json", **bearer(admin_key), **PLAIN}
    data = None if body is None else msgspec.json.encode(body)
    timeout = READ_ANSWER if method == "GET" else CHANGE_ANSWER
    where = f"{url.rstrip('/')}{API_PREFIX}{path}"
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                method, where, data=data, headers=headers, allow_redirects=False, ssl=checks_certificate
            ) as response,
        ):
            status, answer = response.status, await read_answer(response)
    except aiohttp.ClientConnectorError as error:
        raise EngineNotReached(f"no router answers at {url}: {reason_of(error)}", "url") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"no router answers at {url}: {reason_of(error)}", "url") from error
    try:
        found = msgspec.json.decode(answer)
    except UNREADABLE as error:
        raise EngineUnreachable(f"the server at {url} is not a router: HTTP {status}", "url") from error
    if status < 400:
        return found
    if not isinstance(found, dict) or "error" not in found:
        raise EngineUnreachable(f"the server at {url} is not a router: HTTP {status}", "url")
    raise from_wire(status, found)  # pyright: ignore[reportUnknownArgumentType]
