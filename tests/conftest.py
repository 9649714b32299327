"""What all tests have in common."""

from __future__ import annotations

import faulthandler
import gc
import importlib.abc
import importlib.machinery
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from tests.forked_workers import ForkedRun

# gRPC's handlers abort a fork that closes descriptors, and some tests fork processes that keep none.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Machines that run these tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tercet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make check`; `make test-long` runs all examples.
settings.register_profile("quick", settings.get_profile("tercet"), max_examples=20)
settings.load_profile("tercet")

# A shell lets what it runs in the background ignore Ctrl-C, and whoever is started from here would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So it is with nohup and the end of a terminal, which some tests send.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Their files import vLLM or torch, and `make check` does not read them.
IMPORT_VLLM = (
    "tests/unit/vllm_plugin",
    "tests/unit/router/openai",
    "tests/fuzz",
    "tests/unit/router/test_with_vllm.py",
    "tests/unit/transport/memory/test_lazy_device.py",
    "tests/unit/transport/memory/test_staged.py",
    "tests/unit/transport/test_nixl_device.py",
)
# All tests of a file that says so are left out: it is not imported either.
LEFT_OUT = re.compile(r"^pytestmark = .*pytest\.mark\.(processes|slow)\b", re.MULTILINE)


def without_vllm(config: pytest.Config) -> bool:
    """Whether this run is that of `make check`, which computes in no process what takes ten seconds to import."""
    return "not vllm" in config.option.markexpr


class NotInCheck(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Refuses to import vLLM and torch; whether they are installed can be found out all the same."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ("vllm", "torch") or (found := PathFinder.find_spec(fullname, path, target)) is None:
            return None
        found.loader = self
        return found

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        raise RuntimeError(f"`make check` does not import {name}: mark the test `vllm`, or add its file to IMPORT_VLLM")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="processes that run tests, forked after the collection")


def pytest_configure(config: pytest.Config) -> None:
    if without_vllm(config):
        sys.meta_path.insert(0, NotInCheck())
    if os.environ.get("RECORD_VERIFIED", "") not in ("", "0"):
        from tests.verified import Recording

        config.pluginmanager.register(Recording(), "recording")
    if workers := config.getoption("forks"):
        config.pluginmanager.register(ForkedRun(workers), "forked-run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a path has only tests that the expression of `make check` leaves out."""
    if not without_vllm(config):
        return None
    # A folder that is named on the command line is entered without a question.
    if collection_path.relative_to(config.rootpath).as_posix().startswith(IMPORT_VLLM):
        return True
    if collection_path.suffix != ".py" or (found := LEFT_OUT.search(collection_path.read_text())) is None:
        return None
    return f"not {found[1]}" in config.option.markexpr or None


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
        # What tests leave is little, and looking for it often took a tenth of their time.
        gc.set_threshold(100_000, 50, 1000)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
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
        # Modules and caches of a file stay, too. A test that collects garbage looked at them again, for up to a second.
        if nextitem is None or nextitem.path != item.path:
            gc.collect(1)
            gc.freeze()
