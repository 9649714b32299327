"""Settings of every process that calls engines: the engines' secret and TLS, and the process's log."""

from __future__ import annotations

import os
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
        "Secret that engines require. Give it as a variable.", flag="", env=SECRET_VARIABLE, default="none", is_key=True
    ),
]
AdminKey = Annotated[
    str,
    Setting(
        "Key that `/tercet/v1` of a router requires. Give it as a variable.", flag="", env=ADMIN_KEY_VARIABLE,
        default="none", is_key=True,
    ),
]  # fmt: skip
SupervisorKey = Annotated[
    str,
    Setting(
        "Key of the process that starts the router, for `/tercet/v1`; `tercet up` makes a new one at each start.",
        flag="", default="none", is_key=True,
    ),
]  # fmt: skip
AdminKeyFile = Annotated[
    str | None,
    Setting(
        "File of admin keys, one on each line, reloaded when it changes.", metavar="FILE", default="none", panel=ACCESS
    ),
]
APIKeyFile = Annotated[
    str | None,
    Setting(
        "File of client keys, one on each line, reloaded when it changes.", metavar="FILE", default="none", panel=ACCESS
    ),
]
OpenToAll = Annotated[
    bool, Setting("Serve other machines although no client key is set.", default="off", panel=ACCESS)
]  # fmt: skip
CLIENT_TRACES_VARIABLE = "TERCET_CLIENT_TRACES"
ClientTraces = Annotated[
    bool,
    Setting(
        "Let every client ask for its trace (`x-tercet-trace`), which shows how much of a prompt others had cached; "
        "without it only administrators may.",
        default="off", panel=ACCESS,
    ),
]  # fmt: skip


def clients_see_traces() -> bool:
    """True if the variable lets all clients see traces; raise :class:`~tercet.protocol.BadRequest` for other values."""
    said = os.environ.get(CLIENT_TRACES_VARIABLE, "").strip().lower()
    if said not in ("", "0", "false", "1", "true"):
        raise BadRequest(f"{CLIENT_TRACES_VARIABLE}: must be true or false, is {said!r}", CLIENT_TRACES_VARIABLE)
    return said in ("1", "true")


MAX_REQUEST_BYTES = 64 * 1024 * 1024
MostRequestBytes = Annotated[
    AtLeastOne, Setting("Largest request body; a larger one gets 413.", unit="bytes", default="64 MiB")
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
TLSKey = Annotated[
    str | None, Setting("Private key of the certificate (PEM).", metavar="FILE", default="none", panel=ACCESS)
]
AccessLog = Annotated[
    bool,
    Setting(
        "Log a line for each request; it has method, path, status, seconds, client, model, tokens, id.",
        default="off",
        panel=OBSERVABILITY,
    ),
]
TraceRequests = Annotated[
    Annotated[int, msgspec.Meta(ge=0, le=1_000_000)],
    Setting(
        "Latest requests of each process that `tercet trace` shows, and a tenth as many of the slowest. 0: none.",
        in_file=True,
        panel=OBSERVABILITY,
    ),
]
LogLines = Annotated[
    LogFormat, Setting("Format of log lines: text, or one JSON object on each line.", panel=OBSERVABILITY)
]


def require_pair(certificate: str | None, key: str | None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if only one of the two is given."""
    if (certificate is None) != (key is None):
        raise BadRequest("tls-key: a certificate needs its key; set both tls-cert and tls-key", "tls-key")


class EngineTLS(Settings, frozen=True):
    """TLS of https:// engines: the authority that signs their certificates, and this process's certificate and key."""

    ca: Annotated[
        str | None,
        Setting(
            "Certificate authority of https:// engines (PEM).", metavar="FILE", default="the system's", panel=ACCESS
        ),
    ] = msgspec.field(default=None, name="engine-ca")
    cert: Annotated[
        str | None,
        Setting("Client certificate for https:// engines (PEM).", metavar="FILE", default="none", panel=ACCESS),
    ] = msgspec.field(default=None, name="engine-cert")
    key: Annotated[
        str | None, Setting(
            "Private key of `--engine-cert` (PEM).", metavar="FILE", default="in the certificate's file", panel=ACCESS,
        )
    ] = msgspec.field(default=None, name="engine-key")  # fmt: skip
