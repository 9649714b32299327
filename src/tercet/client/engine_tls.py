"""What a caller of ``https://`` engines believes, and what it shows of itself."""

from __future__ import annotations

import ssl

from tercet.protocol import BadRequest


def engine_tls(ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS for the given PEM files; None, which is TLS as the system does it, for no file at all.

    ``ca`` holds the certificates of those who sign the engines' own, in the place of the system's; ``certificate`` is
    the caller's, with its ``key`` unless that is in the same file. Raises :class:`~tercet.protocol.BadRequest` for what
    cannot be used.
    """
    if key is not None and certificate is None:
        raise BadRequest("engine-key: goes with engine-cert", "engine-key")
    if ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"engine-ca: {ca} is no file of certificates (PEM): {error}", "engine-ca") from error
    if certificate is not None:
        try:
            # Without a password of its own OpenSSL would ask the terminal for one.
            context.load_cert_chain(certificate, key, password="")
        except (OSError, ssl.SSLError) as error:
            files = certificate if key is None else f"{certificate} with the key {key}"
            raise BadRequest(
                f"engine-cert: {files} cannot be used (PEM, with no password): {error}", "engine-cert"
            ) from error
    return context
