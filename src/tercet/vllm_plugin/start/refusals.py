"""Refused starts of a server that vLLM runs: one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

from tercet.protocol import TercetError


@contextmanager
def refusing_in_a_sentence() -> Generator[None]:
    """End the process with the message of a Tercet error, where vLLM would print a traceback."""
    try:
        yield
    except TercetError as error:
        print(f"tercet: {error.message}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
