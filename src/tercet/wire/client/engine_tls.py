"""TLS settings of a caller of ``https://`` engines: trusted CAs, and the caller's certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

from tercet.aio.files import require_regular
from tercet.protocol import BadRequest


def engine_tls(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of the given PEM files; None (the system's TLS) without any file.

    ``ca`` has the CA certificates by which engines' certificates are checked, instead of the system's; ``certificate``
    is the caller's, with its ``key`` unless the same file has the key. Raises :class:`~tercet.protocol.BadRequest` for
    unusable files.
    """
    if key is not None and certificate is None:
        raise BadRequest("engine-key: requires engine-cert", "engine-key")
    if ca is None and certificate is None:
        return None
    try:
        if ca is not None:
            require_regular(Path(ca))
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"engine-ca: {ca} is not a file of certificates (PEM): {error}", "engine-ca") from error
    if certificate is not None:
        try:
            for each in (certificate, key):
                if each is not None:
                    require_regular(Path(each))
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError) as error:
            files = certificate if key is None else f"{certificate} with the key {key}"
            raise BadRequest(
                f"engine-cert: {files} cannot be used (PEM, with no password): {error}", "engine-cert"
            ) from error
    return context
