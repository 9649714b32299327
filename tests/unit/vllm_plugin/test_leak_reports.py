"""Nothing is written to standard error after the end of a process that wants no reports of leaks."""

from __future__ import annotations

import subprocess
import sys

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
