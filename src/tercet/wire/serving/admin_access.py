"""Access to the admin routes: with an admin key, or from this machine if no admin key is set.

A client key does not open them. They load code and name machines, so requests that a web page can make a browser send
are refused, too, with any key.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

from tercet.protocol import Unauthorized
from tercet.protocol.access import BearerKeys, Callers
from tercet.protocol.request_checks import (
    ShownHeaders,
    require_json,
    require_no_page,
    require_this_machine,
)
from tercet.protocol.wire import API_PREFIX, MEMBERS
from tercet.settings import SECRET_VARIABLE
from tercet.settings.variables import ADMIN_KEY_VARIABLE
from tercet.wire.serving.server_access import SET_A_SECRET

# In the scope of a request that :meth:`AdminAccess.require` has admitted; admin routes refuse all other requests.
ADMITTED = "tercet.admitted"
# The digest that the body of an engine's call must have.
PROVED = "tercet.proved"
# In a scope of a request that came by the admin address.
AT_ADMIN = "tercet.at_admin"
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
        self,
        keys: BearerKeys | None = None,
        clients: BearerKeys | None = None,
        engines: Callers | None = None,
        supervisor: str = "",
    ) -> None:
        self._keys = BearerKeys(()) if keys is None else keys
        self._clients = BearerKeys(()) if clients is None else clients
        self._engines = Callers(()) if engines is None else engines
        self._supervisor = BearerKeys((supervisor,))

    def require(self, scope: Scope) -> None:
        """Raise :class:`~tercet.protocol.TercetError` unless the request of an ASGI ``scope`` may use its route."""
        headers = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(headers)
        if (path := path_of(scope)).startswith(f"{API_PREFIX}{MEMBERS}"):
            self._require_engine(scope, headers, path.removeprefix(API_PREFIX))
        else:
            self._require_operator(scope, headers)
        require_json(scope["headers"])
        scope[ADMITTED] = True

    def require_operator(self, scope: Scope) -> None:
        """Raise :class:`~tercet.protocol.TercetError` unless the sender of a client's request is an administrator."""
        headers = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(headers)
        self._require_operator(scope, headers)

    def _require_operator(self, scope: Scope, headers: ShownHeaders) -> None:
        if self._supervisor.fits("".join(headers.all("authorization"))):
            return
        if self._keys:
            self._require_key(headers)
        else:
            self._require_this_machine(scope, headers)

    def require_call(self, method: str, path: str, fields: Iterable[tuple[bytes, bytes]], peer: str | None) -> None:
        """Check a request of a server without ASGI; see :meth:`require`. ``peer`` is the caller's address."""
        client = None if peer is None else (peer, 0)
        self.require({"method": method, "path": path, "headers": fields, "client": client})

    def _require_engine(self, scope: Scope, headers: ShownHeaders, path: str) -> None:
        """Require that an engine proves the fleet's secret; without a secret, that it runs on this machine."""
        if not self._engines:
            require_this_machine(headers, _peer_of(scope), f"{_WITHOUT_SECRET}; {SET_A_SECRET}")
            return
        try:
            shown = headers.all("authorization")
            scope[PROVED] = self._engines.require(shown, scope["method"], path, _ENGINES)
        except Unauthorized as refusal:
            refusal.challenge = self._engines.challenge()
            raise

    def _require_key(self, headers: ShownHeaders) -> None:
        shown = headers.all("authorization")
        self._keys.require(shown, _REFUSAL)
        if self._clients.fits("".join(shown)):
            raise Unauthorized(f"{_REFUSAL}; a client key does not open it", "authorization")

    def _require_this_machine(self, scope: Scope, headers: ShownHeaders) -> None:
        by_file = bool(scope.get(AT_ADMIN)) and scope.get("client") is None
        if self._clients and not by_file:  # only the owner may open the socket's file
            raise Unauthorized(f"this router has client keys but no admin key; {_SET_ONE}", "authorization")
        require_this_machine(headers, _peer_of(scope), _SET_ONE)


def _peer_of(scope: Scope) -> str | None:
    """Return the caller's address; None for a connection by a socket's file."""
    client = scope.get("client")
    return None if client is None else client[0]
