"""Settings that every process that calls engines has: the secret and the TLS of engines, and its own log."""

from __future__ import annotations

from typing import Annotated

import msgspec

from tercet.protocol import BadRequest
from tercet.settings.declaration import SECRET_VARIABLE, AtLeastOne, Setting, Settings
from tercet.settings.log_lines import LogFormat, LogLevel
from tercet.settings.panels import ACCESS, OBSERVABILITY
from tercet.settings.variables import ADMIN_KEY_VARIABLE

EngineSecret = Annotated[
    str,
    Setting(
        "What its engines ask for; best given as a variable.", flag="", env=SECRET_VARIABLE, default="none", is_key=True
    ),
]
AdminKey = Annotated[
    str,
    Setting(
        "What `/tercet/v1` of a router asks for; best given as a variable.", flag="", env=ADMIN_KEY_VARIABLE,
        default="none", is_key=True,
    ),
]  # fmt: skip
SupervisorKey = Annotated[
    str,
    Setting(
        "What the process that starts the router shows to `/tercet/v1`; `tercet up` makes one each time.", flag="",
        default="none", is_key=True,
    ),
]  # fmt: skip
AdminKeyFile = Annotated[
    str | None,
    Setting(
        "A file of admin keys, one a line, read again when it changes.", metavar="FILE", default="none", panel=ACCESS
    ),
]
MAX_REQUEST_BYTES = 64 * 1024 * 1024
MostRequestBytes = Annotated[
    AtLeastOne, Setting("Size of a request's body; larger: 413.", unit="bytes", default="64 MiB")
]
LeastLogged = Annotated[LogLevel, Setting("Lowest level of log lines.", panel=OBSERVABILITY)]
TLSCertificate = Annotated[
    str | None,
    Setting(
        "Certificate of this server (PEM), reloaded when it is replaced.",
        metavar="FILE",
        default="none: no TLS",
        panel=ACCESS,
    ),
]
TLSKey = Annotated[str | None, Setting("The certificate's key (PEM).", metavar="FILE", default="none", panel=ACCESS)]
AccessLog = Annotated[
    bool,
    Setting(
        "A line for each request in the log: method, path, status, seconds, client, model, tokens, request id.",
        default="off",
        panel=OBSERVABILITY,
    ),
]
TraceRequests = Annotated[
    Annotated[int, msgspec.Meta(ge=0, le=1_000_000)],
    Setting(
        "Last requests that `tercet trace` shows, of each process; and a tenth as many of the slowest. 0: none.",
        in_file=True,
        panel=OBSERVABILITY,
    ),
]
LogLines = Annotated[LogFormat, Setting("The log's lines as text, or each as a JSON object.", panel=OBSERVABILITY)]


def require_pair(certificate: str | None, key: str | None) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` where there is one of the two."""
    if (certificate is None) != (key is None):
        raise BadRequest("tls-key: a certificate and its key go together", "tls-key")


class EngineTLS(Settings, frozen=True):
    """How engines behind https:// are known, and how they know us."""

    ca: Annotated[
        str | None,
        Setting(
            "Certificate authority of https:// engines (PEM).", metavar="FILE", default="the system's", panel=ACCESS
        ),
    ] = msgspec.field(default=None, name="engine-ca")
    cert: Annotated[
        str | None, Setting("The certificate to show such engines (PEM).", metavar="FILE", default="none", panel=ACCESS)
    ] = msgspec.field(default=None, name="engine-cert")
    key: Annotated[
        str | None, Setting(
            "Private key of it (PEM).", metavar="FILE", default="in the certificate's file", panel=ACCESS,
        )
    ] = msgspec.field(default=None, name="engine-key")  # fmt: skip
