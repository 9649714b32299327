"""What each process of a fleet reads: environment variables, keys and their files, TLS, its log, limits of prefill.

Router, engines, picker and sidecar build their settings from these fields, so that a flag means the same everywhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from tercet.protocol import BadRequest
from tercet.settings.declaration import ACCESS, OBSERVABILITY, SECRET_VARIABLE, Seconds, Setting, Settings

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

URL_VARIABLE = "TERCET_URL"
"""Variable of the URL of the router that commands call, and that ``tercet bench`` measures."""
SPIN_SECONDS_VARIABLE = "TERCET_SPIN_SECONDS"
WARM_PARENT_VARIABLE = "TERCET_WARM_PARENT"
COLD = "cold"
"""Value of ``TERCET_WARM_PARENT``: use no warm parent."""
CACHE_VARIABLE = "TERCET_CACHE"
ENGINE_NAME_VARIABLE = "TERCET_ENGINE_NAME"
ACCESS_LOG_VARIABLE = "TERCET_ACCESS_LOG"
LOG_FORMAT_VARIABLE = "TERCET_LOG_FORMAT"
API_KEY_VARIABLE = "VLLM_API_KEY"
ADMIN_KEY_VARIABLE = "TERCET_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE = "TERCET_ADMIN_KEY_FILE"
CLIENT_KEY_VARIABLE = "TERCET_API_KEY"
POOLING_KEY_VARIABLE = "TERCET_POOLING_KEY"
PREFILL_HOSTS_VARIABLE = "TERCET_PREFILL_HOSTS"
OF_COMMANDS = frozenset({URL_VARIABLE, ADMIN_KEY_VARIABLE, ADMIN_KEY_FILE_VARIABLE, CLIENT_KEY_VARIABLE})
"""Variables that are read by commands that call a router."""
ALL_ENGINES_VARIABLE = "TERCET_ALL_ENGINES"
"""If it is 1, a router keeps its port closed until all of its engines have answered: they start with it."""
LOGS_VARIABLE = "TERCET_LOGS"
"""Directory of the logs of a fleet on this machine, for its router."""
INTERNAL = frozenset({"TERCET_CLOCK_OFFSET", "TERCET_ALLOWED_CORES", ALL_ENGINES_VARIABLE, LOGS_VARIABLE})
"""Variables that Tercet's processes set for their child processes."""
OF_TESTS = frozenset({"TERCET_LONG_TESTS", "TERCET_GOLDEN"})
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
PRELOAD = "LD_PRELOAD"
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
NO_DYNAMO = "TORCHDYNAMO_DISABLE"
"""If it is 1, PyTorch compiles nothing in the process."""
PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"
"""If it is false, tokenizers start no threads in the process."""


class Variable(NamedTuple):
    """An environment variable: its name, the processes that read it (``of``), its default and its meaning."""

    name: str
    of: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        CACHE_VARIABLE,
        "every command",
        "`~/.cache/tercet`",
        "Directory of converted models, logs and the records of background fleets.",
    ),
    Variable(
        SPIN_SECONDS_VARIABLE,
        "engines",
        "0 on a CPU, else vLLM's own",
        "Time for which an engine's process polls for a message without a pause before it sleeps (seconds).",
    ),
    Variable(
        WARM_PARENT_VARIABLE,
        "`tercet up`, `tercet router --workers`",
        "a new process",
        "Socket of a process that has imported vLLM and forks engines and routers; with `cold`, each one imports vLLM.",
    ),
    Variable(
        ENGINE_NAME_VARIABLE,
        "engines that are not started by `tercet`",
        "HOST:PORT",
        "Name of the engine in its status and logs.",
    ),
    Variable(ACCESS_LOG_VARIABLE, "engines", "0", "Log a line for each call of a verb."),
    Variable(LOG_FORMAT_VARIABLE, "engines", "text", "Format of Tercet's log lines: `text` or `json`."),
    Variable(
        PREFILL_HOSTS_VARIABLE,
        "engines",
        "none: the header is ignored",
        "Engines that `x-prefiller-host-port` may name to prefill; same as `prefill_hosts` in the plugin's settings.",
    ),
    Variable(
        API_KEY_VARIABLE,
        "engines and routers",
        "none",
        "API key that the server requires (a variable of vLLM); same as its `--api-key`.",
    ),
    Variable(OPENAI_KEY_VARIABLE, "`tercet bench`", "none", "API key that is sent to the measured server."),
)


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
OpenToAll = Annotated[bool, Setting("Serve other machines although no client key is set.", default="off", panel=ACCESS)]
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
LeastLogged = Annotated[LogLevel, Setting("Lowest level of log lines.", panel=OBSERVABILITY)]
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


class EngineTLS(Settings, frozen=True):
    """TLS of https:// engines: the authority that signs their certificates, and this process's certificate and key."""

    panel: ClassVar[str] = ACCESS
    ca: Annotated[
        str | None, Setting("Certificate authority of https:// engines (PEM).", metavar="FILE", default="the system's")
    ] = msgspec.field(default=None, name="engine-ca")
    cert: Annotated[
        str | None, Setting("Client certificate for https:// engines (PEM).", metavar="FILE", default="none")
    ] = msgspec.field(default=None, name="engine-cert")
    key: Annotated[
        str | None,
        Setting("Private key of `--engine-cert` (PEM).", metavar="FILE", default="in the certificate's file"),
    ] = msgspec.field(default=None, name="engine-key")


PrefillHosts = Annotated[
    str,
    Setting(
        "Engines that x-prefiller-host-port may name: a list HOST:PORT,HOST:PORT. HOST may be a network (10.0.0.0/8) "
        "or have *, PORT may be a range or *.",
        env=PREFILL_HOSTS_VARIABLE,
        default="none: the header is ignored",
    ),
]
PrefillTimeout = Annotated[
    Seconds, Setting("Longest wait for prefill by other engines; after it this engine prefills itself.", unit="seconds")
]
PrefillStuckAfter = Annotated[
    Seconds, Setting("Time without a heartbeat after which a prefill engine counts as failed.", unit="seconds")
]
TIMEOUT_S, STUCK_AFTER_S = 60.0, 5.0


@dataclass(frozen=True)
class PrefillBudget:
    """Limits of prefill by other engines for one request: seconds in total, and seconds without a heartbeat of one."""

    timeout_s: float = TIMEOUT_S
    stuck_after_s: float = STUCK_AFTER_S


LARGEST_FILE = 1024 * 1024


class KeyFile:
    """The keys in the file ``path``; errors begin with the setting ``name``. Lines that begin with # are comments."""

    def __init__(self, path: str, name: str) -> None:
        self._path = Path(path).expanduser()
        self._name = name

    def read(self) -> tuple[str, ...]:
        """Return the keys that the file has now; an empty file has none.

        Raises :class:`~tercet.protocol.BadRequest` if the file cannot be read, or a line cannot be a key. The error
        has the number of the line, and never its text, which may be a secret.
        """
        from tercet.aio.files import read_whole  # imports asyncio

        try:
            content = read_whole(self._path, LARGEST_FILE)  # not a pipe: the file is read again when it changes
        except FileNotFoundError as error:
            raise BadRequest(f"{self._name}: the file {self._path} does not exist", self._name) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadRequest(f"{self._name}: {self._path} cannot be read: {reason}", self._name) from error
        lines = [line.strip() for line in content.splitlines()]
        found = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith(b"#")]
        for number, line in found:
            if not all(0x21 <= byte <= 0x7E for byte in line):
                raise BadRequest(
                    f"{self._name}: line {number} of {self._path} is not a key: use printable ASCII without spaces",
                    self._name,
                )
        return tuple(line.decode() for _, line in found)

    def first(self) -> tuple[str, ...]:
        """Return the keys when a server starts. Raises :class:`~tercet.protocol.BadRequest` if there is none."""
        keys = self.read()
        if not keys:
            raise BadRequest(f"{self._name}: {self._path} has no key; write one on each line", self._name)
        return keys


def spin_seconds(environment: Mapping[str, str], on_cpu: bool) -> float | None:
    """Return the seconds to poll before sleeping; ``None`` leaves the time to vLLM.

    0 on a CPU, unless ``TERCET_SPIN_SECONDS`` sets it. Raises :class:`~tercet.protocol.BadRequest`.
    """
    given = environment.get(SPIN_SECONDS_VARIABLE)
    if given is None:
        return 0.0 if on_cpu else None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(
            f"{SPIN_SECONDS_VARIABLE}={given}: must be a number of seconds, 0 or more", SPIN_SECONDS_VARIABLE
        )
    return seconds
