"""Environment variables that are read by themselves; those of settings follow from the settings."""

from __future__ import annotations

from typing import NamedTuple

from tercet.settings.prefill_settings import PREFILL_HOSTS_VARIABLE

URL_VARIABLE = "TERCET_URL"
"""The router that commands talk to, and that is measured."""
SPIN_SECONDS_VARIABLE = "TERCET_SPIN_SECONDS"
WARM_PARENT_VARIABLE = "TERCET_WARM_PARENT"
COLD = "cold"
"""Named as the warm parent: have none."""
CACHE_VARIABLE = "TERCET_CACHE"
ENGINE_NAME_VARIABLE = "TERCET_ENGINE_NAME"
ACCESS_LOG_VARIABLE = "TERCET_ACCESS_LOG"
LOG_FORMAT_VARIABLE = "TERCET_LOG_FORMAT"
API_KEY_VARIABLE = "VLLM_API_KEY"
ADMIN_KEY_VARIABLE = "TERCET_ADMIN_KEY"
ADMIN_KEY_FILE_VARIABLE = "TERCET_ADMIN_KEY_FILE"
CLIENT_KEY_VARIABLE = "TERCET_API_KEY"
POOLING_KEY_VARIABLE = "TERCET_POOLING_KEY"
OF_COMMANDS = frozenset({URL_VARIABLE, ADMIN_KEY_VARIABLE, ADMIN_KEY_FILE_VARIABLE, CLIENT_KEY_VARIABLE})
"""Those that commands read which talk to a router."""
INTERNAL = frozenset({"TERCET_CLOCK_OFFSET", "TERCET_ALLOWED_CORES"})
"""What Tercet's own processes tell one another."""
OF_TESTS = frozenset({"TERCET_LONG_TESTS", "TERCET_GOLDEN"})
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"


class Variable(NamedTuple):
    """A variable, who reads it, what holds without it, and what it says."""

    name: str
    of: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        CACHE_VARIABLE,
        "every command",
        "`~/.cache/tercet`",
        "Where converted models, logs and the records of fleets in the background are kept.",
    ),
    Variable(
        SPIN_SECONDS_VARIABLE,
        "engines",
        "0 on a CPU, else vLLM's own",
        "For how long an engine's process looks for a message without a pause before it sleeps (seconds).",
    ),
    Variable(
        WARM_PARENT_VARIABLE,
        "`tercet up`, `tercet router --workers`",
        "its own",
        "The socket of a process that has imported vLLM and forks engines and routers; with `cold`, each imports vLLM.",
    ),
    Variable(
        ENGINE_NAME_VARIABLE,
        "engines that are not started by `tercet`",
        "HOST:PORT",
        "The engine's name in its status and logs.",
    ),
    Variable(ACCESS_LOG_VARIABLE, "engines", "0", "A line for each call of a verb in the log."),
    Variable(LOG_FORMAT_VARIABLE, "engines", "text", "The lines of Tercet's own log as text, or `json`."),
    Variable(
        PREFILL_HOSTS_VARIABLE,
        "engines",
        "none: the header is ignored",
        "Engines that `x-prefiller-host-port` may name to prefill, as `prefill_hosts` of the plugin's settings.",
    ),
    Variable(
        API_KEY_VARIABLE,
        "engines and routers",
        "none",
        "vLLM's: the API key that the server asks for, as with its `--api-key`.",
    ),
    Variable(OPENAI_KEY_VARIABLE, "`tercet bench`", "none", "The API key that is sent to the server that is measured."),
)
