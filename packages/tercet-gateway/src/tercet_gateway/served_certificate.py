"""The certificate of a picker or a sidecar, which is reloaded when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from tercet.aio.files import require_regular
from tercet.protocol import BadRequest

if TYPE_CHECKING:
    import grpc  # only pickers need it

logger = logging.getLogger("tercet.gateway")


class ServedCertificate:
    """A certificate and its key, in files that their issuer replaces before they expire.

    The files are checked at each handshake. A pair that cannot be used, such as a new certificate with the old key, is
    ignored until it changes: connections get the last valid pair. Use one object for each server. Raises
    :class:`~tercet.protocol.BadRequest` if the first pair cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        try:
            self._seen = self._stamp()
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(f"tls-cert: {certificate} and {key} cannot be used: {error}", "tls-cert") from error

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server's port.

        gRPC calls back in its threads, where None means no change.
        """
        import grpc

        return grpc.dynamic_ssl_server_credentials(self._pair(), self._renewed_pair, False)  # pyright: ignore[reportArgumentType]

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of any other server."""
        door = self._read()
        door.sni_callback = self._shown  # called at every handshake, with or without a server name
        return door

    def _renewed_pair(self) -> grpc.ServerCertificateConfiguration | None:
        return self._pair() if self._renewed() else None

    def _shown(self, connection: ssl.SSLObject, _name: str | None, _door: ssl.SSLContext) -> None:
        self._renewed()
        connection.context = self._context

    def _renewed(self) -> bool:
        """True if another pair must be used from now on."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            logger.warning(
                "the new certificate in %s cannot be used, the previous one stays in use: %s", self._files[0], error
            )
            return False
        logger.info("the certificate in %s has changed, and is in use from now on", self._files[0])
        return True

    def _stamp(self) -> object:
        for each in self._files:
            require_regular(each)
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in (each.stat() for each in self._files)]

    def _pair(self) -> grpc.ServerCertificateConfiguration:
        import grpc

        certificate, key = self._files
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])

    def _read(self) -> ssl.SSLContext:
        """Load the pair; this also checks it for gRPC, which accepts any files and fails at handshakes."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password="")
        return context
