"""Filters for lines of vLLM's log that do not help an operator of Tercet's engines and need no action."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from tercet.logs import LineBounds

VLLM_LEVEL = "VLLM_LOGGING_LEVEL"
# Beginnings of messages, by vLLM's loggers, which have the names of its modules. A name or a beginning that a version
# of vLLM does not have hides nothing.
NOISE: Mapping[str, Sequence[str]] = {
    # Triton on CPUs, which is not used there.
    "vllm.triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    # Consequences of `--enforce-eager`, which Tercet gives to engines on CPUs.
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.config.compilation": ("Enabled custom fusions",),
    "vllm.config.kernel": ("Final IR op priority",),
    # Tercet's plugins: the vLLM interface that a plugin uses, and the report that it was found.
    "vllm.distributed.kv_transfer.kv_connector.v1.base": ("Initializing KVConnectorBase_V1",),
    "vllm.v1.engine.input_processor": ("Passing raw prompts to InputProcessor",),
    "vllm.plugins": ("Available plugins for group", "- %s -> %s", "Loading plugin", "Loaded endpoint plugin"),
    # These are fifty lines that repeat the API's documentation.
    "vllm.entrypoints.launchers.launcher": ("Available routes are", "Route: "),
    "vllm.entrypoints.scale_out.factories": ("Scale-out endpoints are disabled",),
}


class Without(logging.Filter):
    """A log filter that drops records which begin in one of these ways."""

    def __init__(self, beginnings: Sequence[str]) -> None:
        super().__init__()
        self._beginnings = tuple(beginnings)

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


def without_noise() -> None:
    """Hide :data:`NOISE` in this process, unless vLLM's debug level is set; call it before or after vLLM's import.

    The loggers get filters: vLLM makes a new handler whenever it sets up its log.
    """
    if os.environ.get(VLLM_LEVEL, "").upper() == "DEBUG":
        return
    for name, beginnings in NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, Without) for each in logger.filters):
            logger.addFilter(Without(beginnings))


def bound_lines() -> None:
    """Limit the length of lines from vLLM's handlers in this process: some quote text that clients send."""
    for handler in logging.getLogger("vllm").handlers:
        if not any(isinstance(each, LineBounds) for each in handler.filters):
            handler.addFilter(LineBounds())


def errors_only() -> None:
    """Limit vLLM's log to errors in this process; call it before vLLM's import.

    vLLM logs before it sets up its log. Its own variable has precedence, if it is set.
    """
    logging.getLogger("vllm").setLevel(os.environ.setdefault(VLLM_LEVEL, "ERROR").upper())
