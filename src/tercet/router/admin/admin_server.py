"""The admin address: a separate listening address for operators, apart from the port of clients.

Its requests pass through the same application as those of clients. A mark in their scope distinguishes them for
:class:`~tercet.router.router_app.RouterApp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.protocol import BadRequest
from tercet.settings.admin_address import AdminAddress
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet.wire.serving.server_access import AT_ADMIN

CLOSE_SECONDS = 1
STARTED_POLL_S = 0.01
BACKLOG = 128
OWNER_ALONE = 0o600


class QuietServer(uvicorn.Server):
    """A uvicorn server that does not handle signals; its caller does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def started_by(self, serving: asyncio.Future[None]) -> bool:
        """Wait until the server accepts connections; return False if the task ``serving`` ends before that."""
        while not self.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(STARTED_POLL_S)
        return self.started


@asynccontextmanager
async def admin_served(app: ASGIApp, address: AdminAddress | None, **tls: Any) -> AsyncGenerator[None]:
    """Serve ``app`` at the admin address while entered; do nothing without an address.

    ``tls`` are uvicorn's TLS options for a TCP address. Raises :class:`~tercet.protocol.BadRequest` if the process
    cannot listen at the address.
    """
    if address is None:
        yield
        return
    with _listening(address) as sock:
        config = uvicorn.Config(
            _marked(app), http=BoundedProtocol, ws="none", log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS, **({} if address.path else tls),
        )  # fmt: skip
        server = QuietServer(config)
        serving = asyncio.ensure_future(server.serve([sock]))
        try:
            if not await server.started_by(serving):
                serving.result()
            yield
        finally:
            server.should_exit = True
            await serving


def tls_options(args: Any) -> Mapping[str, Any]:
    """Return uvicorn's TLS options, taken from vLLM's arguments; empty without a certificate."""
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
    return {name: getattr(args, name) for name in names} if args.ssl_certfile else {}


def _marked(app: ASGIApp) -> ASGIApp:
    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, AT_ADMIN: True}, receive, send)

    return served


@contextmanager
def _listening(address: AdminAddress) -> Generator[socket.socket]:
    """Listen at the address while entered; only its owner may open a socket's file, which is removed at the end."""
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            if address.path:
                _bind_file(sock, Path(address.path))
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address.host, address.port))
            sock.listen(BACKLOG)
        except OSError as error:
            raise BadRequest(
                f"admin-listen: cannot listen at {address}: {error.strerror or error}; choose another address",
                "admin-listen",
            ) from error
        try:
            yield sock
        finally:
            if address.path:
                with suppress(OSError):
                    Path(address.path).unlink()


def _bind_file(sock: socket.socket, path: Path) -> None:
    """Bind to a socket file that only its owner may open; replace a file that a killed router left behind."""
    if path.is_socket() and not _is_served(path):
        path.unlink()
    sock.bind(str(path))
    path.chmod(OWNER_ALONE)  # before the socket listens, so no client can have connected


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
