"""Tests whose clock is that of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from tercet_lab.sim import run_virtual

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test as a coroutine in virtual time from second 0; tasks that it leaves are cancelled."""

    @wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        run_virtual(test(*given, **named))

    return run
