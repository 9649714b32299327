"""The certificate that a picker or a sidecar shows, read anew when its files are other ones."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from tercet.protocol import BadRequest

logger = logging.getLogger("tercet.gateway")


class ServedCertificate:
    """A certificate and its key, in files that whoever issues them replaces before they expire.

    They are looked at with each handshake. A pair of files that cannot be used, such as a new certificate with the key
    of the one before, is passed over until it is another one: connections show what was good last. One server at a
    time. Raises :class:`~tercet.protocol.BadRequest` if it cannot be used from the beginning.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        try:
            self._seen = self._stamp()
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(f"tls-cert: {certificate} and {key} cannot be used: {error}", "tls-cert") from error

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server's port; gRPC asks in threads of its own, and of None knows that nothing has changed."""
        return grpc.dynamic_ssl_server_credentials(self._pair(), self._renewed_pair, False)  # pyright: ignore[reportArgumentType]

    def context(self) -> ssl.SSLContext:
        """For any other server."""
        door = self._read()
        door.sni_callback = self._shown  # asked with every handshake, whether or not a name is said
        return door

    def _renewed_pair(self) -> grpc.ServerCertificateConfiguration | None:
        return self._pair() if self._renewed() else None

    def _shown(self, connection: ssl.SSLObject, _name: str | None, _door: ssl.SSLContext) -> None:
        self._renewed()
        connection.context = self._context

    def _renewed(self) -> bool:
        """Whether another pair is to be shown from now on."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            logger.warning("the certificate in %s is not taken, the one before is shown: %s", self._files[0], error)
            return False
        logger.info("the certificate in %s is another one, and shown from now on", self._files[0])
        return True

    def _stamp(self) -> object:
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in (each.stat() for each in self._files)]

    def _pair(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._files
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])

    def _read(self) -> ssl.SSLContext:
        """Also before gRPC is given the files: it takes whatever it is given, and fails at handshakes."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password="")
        return context
