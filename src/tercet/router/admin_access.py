"""Access to the admin routes: with an admin key, or, if none is set, from this machine.

A client's key opens none of them. They load code and name machines, so what a web page may have a browser send is
refused as well, whatever it shows.
"""

from __future__ import annotations

from starlette.types import Scope

from tercet.protocol import Forbidden, Unauthorized
from tercet.protocol.bearer import BearerKeys
from tercet.protocol.own_requests import (
    ShownHeaders,
    is_loopback_address,
    require_json,
    require_local_host,
    require_no_page,
)
from tercet.protocol.wire import API_PREFIX
from tercet.settings.variables import ADMIN_KEY_VARIABLE

# In a scope once :meth:`AdminAccess.require` has let it pass; routes answer to no other.
ADMITTED = "tercet.admitted"
# In a scope of a request that came by the admin address.
AT_ADMIN = "tercet.at_admin"
# vLLM's own routes that change what every client is answered.
_VLLMS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_REFUSAL = f"this route asks for the router's admin key ({ADMIN_KEY_VARIABLE}): Authorization: Bearer KEY"
_SET_ONE = f"set {ADMIN_KEY_VARIABLE}, or --admin-key-file"


def is_admin_path(path: str) -> bool:
    """Whether what is served under ``path`` is for those who run the fleet."""
    return path == API_PREFIX or path.startswith(f"{API_PREFIX}/") or path.rstrip("/") in _VLLMS


class AdminAccess:
    """Lets requests to admin routes pass. ``keys`` open them; without any, requests of this machine do.

    ``clients`` are the keys of clients: a router that asks clients for one, and has no admin key, refuses every caller.
    """

    def __init__(self, keys: BearerKeys | None = None, clients: BearerKeys | None = None) -> None:
        self._keys = BearerKeys(()) if keys is None else keys
        self._clients = BearerKeys(()) if clients is None else clients

    def require(self, scope: Scope) -> None:
        """Raise :class:`~tercet.protocol.TercetError` unless the request of an ASGI ``scope`` may do what it asks."""
        headers = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(headers)
        if self._keys:
            self._require_key(headers)
        else:
            self._require_this_machine(scope, headers)
        require_json(headers)
        scope[ADMITTED] = True

    def _require_key(self, headers: ShownHeaders) -> None:
        shown = headers.all("authorization")
        self._keys.require(shown, _REFUSAL)
        if self._clients.fits("".join(shown)):
            raise Unauthorized(f"{_REFUSAL}; a client's key is none", "authorization")

    def _require_this_machine(self, scope: Scope, headers: ShownHeaders) -> None:
        by_file = bool(scope.get(AT_ADMIN)) and scope.get("client") is None
        if self._clients and not by_file:  # its file opens to its owner alone
            raise Unauthorized(f"this router has keys for clients, and no admin key; {_SET_ONE}", "authorization")
        client = scope.get("client")  # of a socket file there is none
        if client is not None and not is_loopback_address(client[0]):
            raise Forbidden(f"without an admin key this route answers to its own machine only; {_SET_ONE}")
        require_local_host(headers)
