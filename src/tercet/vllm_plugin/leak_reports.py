"""What libraries say of themselves when a process of vLLM's ends, which is of no use to whoever ran it."""

from __future__ import annotations

import atexit
import os

STDERR = 2


def without_leak_reports() -> None:
    """Have nothing more written to standard error once this process has ended all that it runs.

    The binding of ``libtriton`` lists the hundreds of objects that it does not free, and has no switch for Python to
    turn that off. It does so after the last of the functions that :mod:`atexit` calls. Those that were registered
    before this one, such as the one that flushes logs, are called later, and have nothing to write there.
    """
    atexit.register(_close_stderr)


def _close_stderr() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    os.close(nowhere)
