"""What an engine's processes write: stages of the start, errors in one sentence, and nothing that needs no action.

The stages are those of vLLM's worker interface, in the order in which an engine core has its workers go through them.
Each worker of an engine with Tercet's connector is of a subclass that logs them: vLLM gets its name as ``worker_cls``.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from tercet.logs import LineBounds
from tercet.protocol import BadRequest, TercetError
from tercet.settings.declaration import near
from tercet.vllm_plugin.hooks import handed_in, original_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = logging.getLogger(__name__)
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
    """Hide :data:`NOISE` in this process, unless vLLM's debug level is set, by filters of its loggers."""
    if os.environ.get(VLLM_LEVEL, "").upper() == "DEBUG":
        return
    for name, beginnings in NOISE.items():
        _filter_once(logging.getLogger(name), Without(beginnings))


def bound_lines() -> None:
    """Limit the length of lines from vLLM's handlers in this process: some quote text that clients send."""
    for handler in logging.getLogger("vllm").handlers:
        _filter_once(handler, LineBounds())


def _filter_once(filtered: logging.Filterer, by: logging.Filter) -> None:
    """Add a filter unless there is one of its class: a process may load the plugins more than once."""
    if not any(isinstance(each, type(by)) for each in filtered.filters):
        filtered.addFilter(by)


def errors_only() -> None:
    """Limit vLLM's log to errors, unless its variable says otherwise; call this before vLLM's import, which logs."""
    logging.getLogger("vllm").setLevel(os.environ.setdefault(VLLM_LEVEL, "ERROR").upper())


# ---- errors ----------------------------------------------------------------------------------------------------------


AFTER_DASHES = "flags for vLLM"


def refuse_in_a_sentence() -> None:
    """Make vLLM's parsers raise :class:`~tercet.protocol.BadRequest` instead of printing their usage and exiting.

    Relies on ``FlexibleArgumentParser.error`` being called by argparse with a message, and looked up on the class.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        meant = ""
        if unknown := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
            hint = near(unknown[1], flags)
            meant = f"; {hint}" if hint.startswith("did you mean") else "; `vllm serve --help=all` lists them"
        raise BadRequest(f"{AFTER_DASHES}: {message}{meant}", AFTER_DASHES)

    FlexibleArgumentParser.error = refuse  # type: ignore[method-assign]


@contextmanager
def refusing_in_a_sentence() -> Generator[None]:
    """End the process with the message of a Tercet error, where vLLM would print a traceback."""
    try:
        yield
    except TercetError as error:
        print(f"tercet: {error.message}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


STDERR = 2


def without_leak_reports() -> None:
    """Write nothing more to standard error after this process has ended its work.

    The binding of ``libtriton`` lists the hundreds of objects that it does not free, and Python cannot turn that off.
    It prints the list after the last function that :mod:`atexit` calls. Functions that were registered before this one,
    such as the one that flushes logs, are called later, and write nothing to standard error.
    """

    def close_stderr() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)

    atexit.register(close_stderr)


# ---- stages of the start ---------------------------------------------------------------------------------------------


MARK = f"[{__name__}] stage: "
"""Text before a stage's name in a log line."""
OF_WORKERS: Mapping[str, str] = {
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "memory profile",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "compilation",
}
WITHOUT_COMPILATION = "warm-up"
FIRST_REQUESTS = "first requests"


def begin(stage: str) -> None:
    """Log that this engine has reached ``stage``."""
    logger.info("stage: %s", stage)


def log_stages_of_workers(config: VllmConfig) -> None:
    """Make the first worker of an engine with this ``config`` log its stages."""
    parallel = config.parallel_config
    if not parallel.worker_cls.startswith(__name__):
        parallel.worker_cls = handed_in(__name__, parallel.worker_cls)


@functools.cache
def __getattr__(name: str) -> type:
    worker = original_of(name)
    methods = {
        method: _logged(getattr(worker, method), stage)
        for method, stage in OF_WORKERS.items()
        if hasattr(worker, method)
    }
    return type(worker.__name__, (worker,), methods)


def _logged(original: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def logged(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.rank == 0:
            eager = worker.model_config.enforce_eager
            begin(WITHOUT_COMPILATION if stage == OF_WORKERS["compile_or_warm_up_model"] and eager else stage)
        return original(worker, *args, **kwargs)

    return logged
