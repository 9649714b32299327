"""Causes of connection errors as text for people: without addresses, and without a library's wording."""

from __future__ import annotations

import os
import socket
import ssl

import aiohttp


def reason_of(error: BaseException) -> str:
    """Return why a call got no answer, such as ``Connection refused``, without the address of the call."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(cause, (ssl.SSLError, ssl.CertificateError)):
        said = getattr(cause, "verify_message", "") or getattr(cause, "reason", "")
        return f"TLS: {said or 'no secure connection'}"
    if isinstance(cause, TimeoutError):
        return "it took too long"
    if isinstance(cause, socket.gaierror):
        return "cannot resolve its host name"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
