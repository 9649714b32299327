"""Commands whose output nobody reads any more, as behind ``| head`` once that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def with_nobody_reading(argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``tercet`` into a pipe whose other end is closed, with ``text`` on its standard input."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "tercet.cli", *argv],
            input=text, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
