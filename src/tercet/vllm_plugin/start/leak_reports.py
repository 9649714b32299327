"""Suppression of the leak reports that libraries write at the end of a vLLM process: they do not help its users."""

from __future__ import annotations

import atexit
import os

STDERR = 2


def without_leak_reports() -> None:
    """Write nothing more to standard error after this process has ended its work.

    The binding of ``libtriton`` lists the hundreds of objects that it does not free, and Python cannot turn that off.
    It prints the list after the last function that :mod:`atexit` calls. Functions that were registered before this one,
    such as the one that flushes logs, are called later, and write nothing to standard error.
    """
    atexit.register(_close_stderr)


def _close_stderr() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    os.close(nowhere)
