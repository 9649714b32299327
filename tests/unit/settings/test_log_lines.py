"""Log lines of Tercet's own are written whatever a library does to the root logger."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

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


def said_as_json(script: str) -> list[dict[str, Any]]:
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    return [json.loads(line) for line in said.splitlines()]


def test_lines_as_json() -> None:
    script = """
import logging
from tercet.settings.log_lines import FIELDS, access_logger, log_to_stderr

log_to_stderr("warning", "json", access=True)
logger = logging.getLogger("tercet.router")
logger.warning("engines: %s is %s", "decode-0", "drained")
logger.info("not wanted")
try:
    raise ValueError("a b\\nc")
except ValueError:
    logger.exception("it failed")
access_logger.info("GET /health %d", 200, extra={FIELDS: {"status": 200}})
"""
    drained, failed, access = said_as_json(script)
    at = datetime.fromisoformat(drained.pop("time"))
    assert abs((datetime.now(UTC) - at).total_seconds()) < 3600
    assert drained == {
        "level": "warning", "logger": "tercet.router", "subject": "engines", "message": "engines: decode-0 is drained",
    }  # fmt: skip
    assert failed["exception"].endswith("ValueError: a b\nc")
    assert (access["level"], access["logger"], access["status"]) == ("info", "tercet.access", 200)
