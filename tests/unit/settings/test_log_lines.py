"""Log lines of Tercet's own are written whatever a library does to the root logger."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
from tercet.settings.log_lines import log_to_stderr

log_to_stderr("info")
log_to_stderr("error")  # the first one has decided
logging.basicConfig(level=logging.INFO)
logging.getLogger().setLevel(logging.ERROR)
for handler in logging.getLogger().handlers:
    handler.setLevel(logging.ERROR)
logging.getLogger("tercet.router").info("an engine is drained")
logging.getLogger("tercet.router").debug("not wanted")
logging.getLogger("other").warning("silenced")
"""


def test_a_library_that_silences_the_root_logger_does_not_silence_ours() -> None:
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("INFO ")
    assert said[0].endswith("[tercet.router] an engine is drained")
