"""The certificate that a picker shows Envoy, read anew when its files are other ones."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from tercet.protocol import BadRequest

logger = logging.getLogger("tercet.gateway")


class ServedCertificate:
    """A certificate and its key, in files that whoever issues them replaces before they expire.

    gRPC asks for them at each handshake, in threads of its own. A pair of files that cannot be used, such as a new
    certificate with the key of the one before, is passed over until it is another one: connections show what was good
    last. Raises :class:`~tercet.protocol.BadRequest` if it cannot be used from the beginning.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        try:
            self._seen = self._stamp()
            self._first = self._read()
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(f"tls-cert: {certificate} and {key} cannot be used: {error}", "tls-cert") from error

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server's port."""
        # Of None gRPC's types know nothing; it stands for what was shown before.
        return grpc.dynamic_ssl_server_credentials(self._first, self.renewed, False)  # pyright: ignore[reportArgumentType]

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What is to be shown from now on; None if that is what was shown before."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            self._seen = stamp
            found = self._read()
        except (OSError, ssl.SSLError) as error:
            logger.warning("the certificate in %s is not taken, the one before is shown: %s", self._files[0], error)
            return None
        logger.info("the certificate in %s is another one, and shown from now on", self._files[0])
        return found

    def _stamp(self) -> object:
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in (each.stat() for each in self._files)]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._files
        # gRPC takes whatever it is given, and fails at handshakes.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])
