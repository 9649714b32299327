"""Access to this engine's verbs: the keys and addresses, decided once, from the server's start options."""

from __future__ import annotations

import ipaddress
import os
import socket
from argparse import Namespace
from collections.abc import Sequence

from tercet.protocol import BadRequest
from tercet.protocol.access import Callers, given_key, key_of, secrets_of
from tercet.settings import SECRET_VARIABLE
from tercet.settings.variables import API_KEY_VARIABLE

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
