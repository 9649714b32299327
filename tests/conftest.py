"""What all tests have in common."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Machines that run these tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tercet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make check`; `make test-long` runs all examples.
settings.register_profile("quick", settings.get_profile("tercet"), max_examples=20)
settings.load_profile("tercet")

# A shell lets what it runs in the background ignore Ctrl-C, and whoever is started from here would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: no garbage collection need look at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
