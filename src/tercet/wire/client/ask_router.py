"""Calls of a router: of its admin API, and of an engine that joins it, stays and leaves."""

from __future__ import annotations

from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import msgspec

from tercet.protocol import EngineNotReached, EngineUnreachable, from_wire
from tercet.protocol.access import Prover, bearer
from tercet.protocol.wire import API_PREFIX, MEMBERS, UNREADABLE, JoinCall, Joined
from tercet.wire.client.bounded_answers import PLAIN, proved, read_answer, reason_of

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


# The router asks the engine for its status, and updates its other processes, before it answers.


class RouterMembership:
    """The membership of the engine ``name`` at the router ``url``.

    An async context manager; its exit closes the connection. Without a ``secret``, only a router of the same machine
    lets the engine join.
    """

    def __init__(self, url: str, name: str, secret: str = "") -> None:
        self._url = url.rstrip("/")
        self._path = MEMBERS + quote(name, safe="")
        self._signed = MEMBERS + name
        self._prover = Prover(secret)

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=CHANGE_ANSWER, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def join(self, call: JoinCall) -> Joined:
        """Join the router, or stay a member. Raises :class:`~tercet.protocol.TercetError`, as :meth:`leave` does."""
        return await self._ask("PUT", "", msgspec.json.encode(call))

    async def leave(self, uid: str) -> Joined:
        """Leave the router, for the start ``uid`` of the engine."""
        return await self._ask("DELETE", f"/{uid}", None)

    async def _ask(self, method: str, rest: str, body: bytes | None) -> Joined:
        where = f"{self._url}{API_PREFIX}{self._path}{rest}"

        async def ask(proof: dict[str, str]) -> aiohttp.ClientResponse:
            headers = {"content-type": "application/json", **proof, **PLAIN}
            return await self._client.request(method, where, data=body, headers=headers, allow_redirects=False)

        try:
            async with await proved(self._prover, method, self._signed + rest, body, ask) as response:
                status, answer = response.status, await read_answer(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"no router answers at {self._url}: {reason_of(error)}", "url") from error
        try:
            if status < HTTPStatus.BAD_REQUEST:
                return msgspec.json.decode(answer, type=Joined)
            error = from_wire(status, msgspec.json.decode(answer))
        except UNREADABLE as unreadable:
            raise EngineUnreachable(f"the server at {self._url} is not a router: HTTP {status}", "url") from unreadable
        raise error
