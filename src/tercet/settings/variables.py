"""Environment variables that are not settings; the variables of settings follow from their declarations."""

from __future__ import annotations

from typing import NamedTuple

from tercet.settings.prefill_settings import PREFILL_HOSTS_VARIABLE

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
OF_COMMANDS = frozenset({URL_VARIABLE, ADMIN_KEY_VARIABLE, ADMIN_KEY_FILE_VARIABLE, CLIENT_KEY_VARIABLE})
"""Variables that are read by commands that call a router."""
ALL_ENGINES_VARIABLE = "TERCET_ALL_ENGINES"
"""If it is 1, a router keeps its port closed until all of its engines have answered: they start with it."""
INTERNAL = frozenset({"TERCET_CLOCK_OFFSET", "TERCET_ALLOWED_CORES", ALL_ENGINES_VARIABLE})
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
