"""Who may call: an engine's verbs, a router's admin routes, and its other routes; with the keys for each.

The keys and addresses of an engine are decided once, from the server's start options. A router's keys are reloaded when
their files change.

Also one request's body, read with a limit, and its context, which is determined once and passed on from there. The
handlers of vLLM call its engine client without this context, in the request's task or in tasks that they start. Only
they need :func:`current`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tercet.protocol import BadRequest, RequestTooLarge, Unauthorized
from tercet.protocol.access import given_key, key_of, secrets_of
from tercet.protocol.request_checks import require_json
from tercet.protocol.wire import API_PREFIX, MEMBERS
from tercet.settings import SECRET_VARIABLE, RouterSettings
from tercet.settings.engine_addresses import AdminAddress
from tercet.settings.process_settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, KeyFile
from tercet.settings.router_settings import RouterConfig
from tercet.wire.callers import BearerKeys, Callers, ShownHeaders, require_no_page, require_this_machine

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

    from tercet.protocol import TercetError
    from tercet.wire.serving.client_connection import ClientConnection


logger = logging.getLogger("tercet.router")
POLL_INTERVAL_S = 1.0
SET_A_SECRET = f"set {SECRET_VARIABLE} to the same long random text for every engine and router of the fleet"
ASKS_FOR_A_KEY = (
    f"this engine requires its fleet's secret ({SECRET_VARIABLE}), or its API key: Authorization: Bearer KEY"
)


def callers_of(args: Namespace, secret: str) -> Callers:
    """Return the keys for the verbs of a vLLM server with these arguments, including the fleet's ``secret`` if set.

    Raises :class:`~tercet.protocol.BadRequest` if there is no key, and other machines can reach the server.
    """
    keys = [*secrets_of(secret), *api_keys(args)]
    if not args.uds:
        require_key_beyond_loopback(args.host, keys)
    return Callers(keys)


def api_keys(args: Namespace) -> Sequence[str]:
    """Return vLLM's own keys, by vLLM's rule: those of its command line, otherwise that of its variable.

    An empty variable counts as none. Raises :class:`~tercet.protocol.BadRequest` for another blank key.
    """
    given = [given_key(key, "--api-key") for key in args.api_key or ()]
    return [key for key in given or [key_of(os.environ.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)] if key]


def require_key_beyond_loopback(host: str | None, keys: Sequence[str]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if other machines can reach ``host`` and there is no key."""
    if not any(key.strip() for key in keys) and not is_loopback(host):
        raise BadRequest(
            f"--host: other machines can reach the verbs of an engine at {host or 'any address'}, so {SET_A_SECRET} "
            "(or give vLLM's --api-key, or --host 127.0.0.1)",
            "host",
        )


def is_loopback(host: str | None) -> bool:
    """True if only this machine can reach a server that listens on ``host``; None is any address."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


# ---- Admin routes ----------------------------------------------------------------------------------------------------


# In the scope of a request that :meth:`AdminAccess.require` has admitted; admin routes refuse all other requests.
ADMITTED = "tercet.admitted"
# The digest that the body of an engine's call must have.
PROVED = "tercet.proved"
# In a scope of a request that came by the admin address.
AT_ADMIN = "tercet.at_admin"
# In the scope of a request that the router itself sends, for a batch: the owner of the batch. No client can set it.
OF_BATCH = "tercet.batch"
# vLLM's own routes that change the answers for all clients.
_VLLMS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_ENGINES = f"this route requires the fleet's secret ({SECRET_VARIABLE})"
_WITHOUT_SECRET = "a router without its fleet's secret lets only engines on its machine join"
_REFUSAL = f"this route requires the router's admin key ({ADMIN_KEY_VARIABLE}): Authorization: Bearer KEY"
_SET_ONE = f"set {ADMIN_KEY_VARIABLE} or --admin-key-file"


def is_admin_path(path: str) -> bool:
    """True if ``path`` is that of an admin route, which is for operators."""
    return path == API_PREFIX or path.startswith(f"{API_PREFIX}/") or path.rstrip("/") in _VLLMS


def path_of(scope: Scope) -> str:
    """Return the path of a request without the prefix that a proxy before this router adds."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class AdminAccess:
    """The check of requests to admin routes: ``keys`` open them; without keys, requests from this machine do.

    ``clients`` are the client keys: a router with client keys and without an admin key refuses every caller.
    ``engines`` checks the fleet's secret, with which engines may join and call no other route. ``supervisor`` is the
    key of the process that started this one; empty without such a process.
    """

    def __init__(
        self, keys: BearerKeys | None = None, clients: BearerKeys | None = None, engines: Callers | None = None,
        supervisor: str = "",
    ) -> None:  # fmt: skip
        self._keys = BearerKeys(()) if keys is None else keys
        self._clients = BearerKeys(()) if clients is None else clients
        self._engines = Callers(()) if engines is None else engines
        self._supervisor = BearerKeys((supervisor,))

    def require(self, scope: Scope) -> None:
        """Raise :class:`~tercet.protocol.TercetError` unless the request of an ASGI ``scope`` may use its route."""
        headers = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(headers)
        if not (path := path_of(scope)).startswith(f"{API_PREFIX}{MEMBERS}"):
            self._require_operator(scope, headers)
        elif not self._engines:  # engines that join, without a secret of the fleet
            require_this_machine(headers, _peer_of(scope), f"{_WITHOUT_SECRET}; {SET_A_SECRET}")
        else:
            try:
                shown, called = headers.all("authorization"), path.removeprefix(API_PREFIX)
                scope[PROVED] = self._engines.require(shown, scope["method"], called, _ENGINES)
            except Unauthorized as refusal:
                refusal.challenge = self._engines.challenge()
                raise
        require_json(scope["headers"])
        scope[ADMITTED] = True

    def require_operator(self, scope: Scope) -> None:
        """Raise :class:`~tercet.protocol.TercetError` unless the sender of a client's request is an administrator."""
        headers = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(headers)
        self._require_operator(scope, headers)

    def _require_operator(self, scope: Scope, headers: ShownHeaders) -> None:
        shown = headers.all("authorization")
        if self._supervisor.fits("".join(shown)):
            return
        if self._keys:
            self._keys.require(shown, _REFUSAL)
            if self._clients.fits("".join(shown)):
                raise Unauthorized(f"{_REFUSAL}; a client key does not open it", "authorization")
            return
        by_file = bool(scope.get(AT_ADMIN)) and scope.get("client") is None
        if self._clients and not by_file:  # only the owner may open the socket's file
            raise Unauthorized(f"this router has client keys but no admin key; {_SET_ONE}", "authorization")
        require_this_machine(headers, _peer_of(scope), _SET_ONE)

    def require_call(self, method: str, path: str, fields: Iterable[tuple[bytes, bytes]], peer: str | None) -> None:
        """Check a request of a server without ASGI; see :meth:`require`. ``peer`` is the caller's address."""
        client = None if peer is None else (peer, 0)
        self.require({"method": method, "path": path, "headers": fields, "client": client})


def _peer_of(scope: Scope) -> str | None:
    """Return the caller's address; None for a connection by a socket's file."""
    client = scope.get("client")
    return None if client is None else client[0]


# ---- Keys of a router ------------------------------------------------------------------------------------------------


class KeySettings(Protocol):
    """The settings of keys, of a router or of a server before routers."""

    @property
    def admin_key(self) -> str: ...
    @property
    def api_key_file(self) -> str | None: ...
    @property
    def admin_key_file(self) -> str | None: ...
    @property
    def open_to_all(self) -> bool: ...


class RouterKeys:
    """The ``clients`` keys for vLLM's routes and the ``admins`` keys for admin routes.

    ``given`` are client keys that come from flags or the environment.
    """

    def __init__(self, config: KeySettings, given: Sequence[str]) -> None:
        self._given = {"api-key-file": tuple(given), "admin-key-file": (config.admin_key,)}
        paths = {"api-key-file": config.api_key_file, "admin-key-file": config.admin_key_file}
        self._files = {name: KeyFile(path, name) for name, path in paths.items() if path is not None}
        self._read = {name: file.first() for name, file in self._files.items()}
        self._failed: dict[str, str] = {}
        self._engines = Callers(secrets_of(config.secret if isinstance(config, RouterSettings) else ""))
        self._supervisor = config.supervisor_key if isinstance(config, RouterConfig) else ""
        self.clients, self.admins = (self._keys(name) for name in paths)
        if self.admins.shares_with(self.clients):
            raise BadRequest(
                "admin-key: is also a client key, so clients would be administrators; set another key", "admin-key"
            )

    def _keys(self, name: str) -> BearerKeys:
        return BearerKeys((*self._given[name], *self._read.get(name, ())), always=name in self._files)

    @property
    def access(self) -> AdminAccess:
        return AdminAccess(self.admins, self.clients, self._engines, self._supervisor)

    @property
    def first_of_clients(self) -> str:
        """One of the client keys, to be shown to other servers; empty without keys."""
        return next(iter((*self._given["api-key-file"], *self._read.get("api-key-file", ()))), "")

    def require_private(self, host: str, config: KeySettings) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if other machines reach ``host`` and clients need no key."""
        if not self.clients and not config.open_to_all and not is_loopback(host):
            flag = "--api-key after --, " if isinstance(config, RouterSettings) else ""
            raise BadRequest(
                f"host: other machines reach {host or 'any address'}, and clients need no key; set {flag}"
                f"{API_KEY_VARIABLE} or --api-key-file, or allow this with --open-to-all",
                "host",
            )

    def require_private_admin(self, address: AdminAddress | None) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if other machines reach the admin address without an admin key."""
        if address is not None and not address.path and not self.admins and not is_loopback(address.host):
            raise BadRequest(
                f"admin-listen: other machines reach {address}, and no admin key is set; set {ADMIN_KEY_VARIABLE} or "
                "--admin-key-file, or listen at 127.0.0.1",
                "admin-listen",
            )

    async def follow(self) -> None:
        """Reload the key files when they change, until cancelled."""
        while self._files:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Reload the key files; keep the keys of a file that cannot be read. An empty file refuses every caller."""
        for name, keys in (("api-key-file", self.clients), ("admin-key-file", self.admins)):
            file = self._files.get(name)
            if file is None:
                continue
            try:
                found = await asyncio.to_thread(file.read)  # a network file system may hang
            except BadRequest as error:
                self._tell(name, error.message + "; the present keys stay valid")
                continue
            self._tell(name, "" if found or any(self._given[name]) else f"{name}: has no key; refusing every caller")
            if found != self._read[name]:
                self._read[name] = found
                keys.replace((*self._given[name], *found))
                logger.info("%s: reloaded %d keys", name, len(found))

    def _tell(self, name: str, failure: str) -> None:
        if failure and self._failed.get(name) != failure:
            logger.error("%s", failure)
        self._failed[name] = failure


class BodyTurn:
    """The preparation of one client's long body, until :meth:`end`."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over: Callable[[], None] | None = over

    @property
    def has_ended(self) -> bool:
        """True if the turn has ended, so that the client's next body may have begun."""
        return self._over is None

    def end(self) -> None:
        """Let the client's next body begin; calls after the first one do nothing."""
        over, self._over = self._over, None
        if over is not None:
            over()


class Asked(msgspec.Struct, frozen=True):
    """The fields that the router itself uses; vLLM reads the others. Empty if vLLM would not accept the body."""

    model: str | None = ""
    priority: int = 0
    user: str | None = None  # in the form that is kept, as is the session's name
    stream: Any = None
    session_name: str | None = None
    # The fields from which sampling parameters are derived, by parameter: an engine that refuses a parameter refuses
    # that field.
    parameters: Mapping[str, str] = {}


NOTHING = Asked()
CONTEXT = "tercet.context"
"""The key of the request's context in an ASGI scope."""


@dataclass(slots=True, eq=False)
class RequestContext:
    """One HTTP request."""

    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # names in lower case
    form: str = ""  # of its body, by :mod:`tercet.protocol.request_checks`; empty without a body
    fields: dict[str, Any] | None = None  # its body, if that is a JSON object
    asked: Asked = NOTHING
    began: float = field(default_factory=time.monotonic)
    connection: ClientConnection | None = None
    # One entry per sequence that it started (``n``, or several prompts): its trace, and the generated output.
    traces: list[Any] = field(default_factory=list[Any])
    sequences: list[Any] = field(default_factory=list[Any])
    background: bool = False  # a request of a batch
    wants_trace: bool = False  # its client gets the traces
    failed: TercetError | None = None  # the error that ended the first of its sequences that failed, or the refusal
    client_left: bool = False  # before it was admitted
    # The error, in OpenAI's form, in the chat stream from which vLLM makes the answer.
    stream_error: Mapping[str, Any] | None = None
    # The tasks of sequences by vLLM's ids, the number of prompts begun, the most sequences allowed, and the
    # function that makes the context in which one more of them runs.
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    generations: int = 0
    most_sequences: int | None = None
    concurrency: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    preparation: BodyTurn | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    # On the fast path: vLLM's parser of the answer, if it made one to prepare it; and the function that streams a
    # sequence that vLLM has added.
    parser: Any = None
    begin_stream: Callable[[Any], object] | None = None
    has_ended: bool = False
    # Whether the answer calls a tool, and the functions to call when it has ended.
    calls_tool: bool = False
    when_ended: list[Callable[[RequestContext], object]] = field(
        default_factory=list["Callable[[RequestContext], object]"]
    )

    def prepared(self) -> None:
        """Record that its first sequence runs, or that none will: the client's next long body may then be prepared."""
        if self.preparation is not None:
            self.preparation.end()

    def end(self) -> None:
        """End the request: the answer is sent, or its client has left. Its sequences end, and no more begin.

        vLLM aborts the sequences that it has added; a function in ``when_ended`` makes it forget the request.
        """
        self.has_ended = True
        for call in self.when_ended:
            call(self)
        for task in [*self.running.values()]:
            task.cancel()


_current: ContextVar[RequestContext | None] = ContextVar("tercet_request", default=None)


def current() -> RequestContext:
    """Return the context of the HTTP request being served; an empty one outside of any request."""
    return _current.get() or RequestContext()


@contextmanager
def serving(context: RequestContext) -> Generator[None]:
    """Make ``context`` the one of the HTTP request being served in this block; end it at the exit."""
    token = _current.set(context)
    try:
        yield
    finally:
        context.end()
        _current.reset(token)


# ---- The body --------------------------------------------------------------------------------------------------------


class BodyTaker(Protocol):
    """A buffer of one body: it takes the pieces, and has the whole ``content`` after the end."""

    content: bytes

    def take(self, piece: bytes) -> None: ...

    def end(self) -> None: ...


class BodyPieces:
    """A buffer of one body that no limit of several bodies applies to."""

    def __init__(self) -> None:
        self.content = b""
        self._pieces: list[bytes] = []

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def end(self) -> None:
        self.content = b"".join(self._pieces)
        self._pieces.clear()


async def read_whole(receive: Receive, announced: str, limit: int, taker: str, body: BodyTaker) -> bool:
    """Read the body of an ASGI request into ``body``; return False if its client leaves before its end.

    ``announced`` is its ``content-length``, or empty. Raises :class:`~tercet.protocol.RequestTooLarge` for more than
    ``limit`` bytes, the limit of the ``taker``.
    """
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit, taker)
    nothing: Message = {}
    size, more, message = 0, True, nothing
    try:
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return False
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit, taker)
            body.take(message.get("body", b""))
            more = message.get("more_body", False)
        body.end()
        return True
    finally:
        message = nothing  # an exception refers to this frame, and may outlive it by far


def _too_large(limit: int, taker: str) -> RequestTooLarge:
    return RequestTooLarge(f"the request's body has more than {limit} bytes, the limit of {taker}")
