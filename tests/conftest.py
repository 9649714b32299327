"""What all tests have in common."""

from __future__ import annotations

import faulthandler
import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

# Machines that run these tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tercet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make check`; `make test-long` runs all examples.
settings.register_profile("quick", settings.get_profile("tercet"), max_examples=20)
settings.load_profile("tercet")

# A shell lets what it runs in the background ignore Ctrl-C, and whoever is started from here would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Their files import vLLM, and `make check` does not read them.
IMPORT_VLLM = ("tests/unit/vllm_plugin", "tests/fuzz", "tests/unit/router/test_with_vllm.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a path has only tests that the expression of `make check` leaves out."""
    if "not vllm" not in config.option.markexpr:
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in IMPORT_VLLM or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what imports vLLM."""
    if item.nodeid.startswith(IMPORT_VLLM):
        item.add_marker(pytest.mark.vllm)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: no garbage collection need look at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A teardown has the bound of a whole test, and ends its process with all stacks when it exceeds it.

    pytest and pytest-timeout both stop their clocks when a test fails: what is torn down after it may hang for ever.
    """
    seconds = float(item.config.getini("faulthandler_timeout") or 0)
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
