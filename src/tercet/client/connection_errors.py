"""What went wrong with a connection, in words for people: without addresses, and without a library's own words."""

from __future__ import annotations

import os
import socket
import ssl

import aiohttp


def reason_of(error: BaseException) -> str:
    """Why a call got no answer, such as ``Connection refused``; nothing in it tells where the call went."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(cause, (ssl.SSLError, ssl.CertificateError)):
        said = getattr(cause, "verify_message", "") or getattr(cause, "reason", "")
        return f"TLS: {said or 'no secure connection'}"
    if isinstance(cause, TimeoutError):
        return "it took too long"
    if isinstance(cause, socket.gaierror):
        return "its name is not known"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__
