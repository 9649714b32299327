"""Log lines of Tercet's own are written whatever a library does to the root logger."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from queue import Queue
from typing import Any

import pytest

from tercet import logs
from tercet.logs import (
    EVENTS,
    LONGEST_LINE,
    LONGEST_TRACEBACK,
    MOST_LINES,
    WITHIN_SECONDS,
    LineBounds,
    TextLines,
    access_logger,
    saying_while,
    serious_event,
)

pytestmark = pytest.mark.slow

SCRIPT = """
import logging
from tercet.logs import log_to_stderr

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


def test_a_long_step_is_said_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    said: Queue[str] = Queue()
    with saying_while("importing", said.put):
        pass
    assert said.empty()
    monkeypatch.setattr(logs, "SLOW_SECONDS", 0.001)
    monkeypatch.setattr(logs, "STILL_SECONDS", 0.001)
    with saying_while("importing", said.put):
        assert said.get(timeout=60) == said.get(timeout=60) == "importing (0 s)"


def said_as_json(script: str) -> list[dict[str, Any]]:
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    return [json.loads(line) for line in said.splitlines()]


def test_lines_as_json() -> None:
    script = """
import logging
from tercet.logs import ENGINE_DRAINED
from tercet.logs import FIELDS, access_logger, log_to_stderr

log_to_stderr("warning", "json", access=True)
logger = logging.getLogger("tercet.router")
ENGINE_DRAINED.tell(engine="decode-0", reason="asked for")
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
    assert drained.pop("process") > 0
    assert drained == {
        "level": "warning", "logger": "tercet.events", "event": "engine_drained", "engine": "decode-0",
        "reason": "asked for", "message": "engine_drained: decode-0 is drained and not picked: asked for",
    }  # fmt: skip
    assert failed["exception"].endswith("ValueError: a b\nc")
    assert (access["level"], access["logger"], access["status"]) == ("info", "tercet.access", 200)


SAYS_EVENTS = """
from tercet import logs
from tercet.logs import log_to_stderr

log_to_stderr("info", "{form}")
logs.RETRY.tell(seq_id="s", program="p", tokens=3, reason="what one request met")
logs.ENGINE_DRAINED.tell(engine="decode-0", reason="somebody [tercet.events] asked")
logs.RELOAD_REFUSED.tell(file="mine.py", reason="no: it is not good")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_serious_events_are_found_in_a_log_of_either_form(form: str) -> None:
    script = SAYS_EVENTS.replace("{form}", form)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    found = [serious_event(line) for line in (*said.splitlines(), "Traceback", "{", "{}", "[1]", "")]
    assert [each for each in found if each is not None] == [
        "engine_drained: decode-0 is drained and not picked: somebody [tercet.events] asked",
        "reload_refused: mine.py changed and its new content is not used: no: it is not good",
    ]


FORGES = """
from tercet import logs
from tercet.logs import access_logger, log_to_stderr

log_to_stderr("info", "{form}", access=True)
access_logger.info("GET %s", "/\\nERROR 11-23 12:00:00 [tercet.events] engine_lost: not so")
logs.REQUEST_FAILED.tell(seq_id="a\\x1b[2Jb\\u2028c", code="engine_error", reason="it is\\nso")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_clients_name_looks_like_no_other_line(form: str) -> None:
    script = FORGES.replace("{form}", form)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    accessed, failed = said.removesuffix("\n").split("\n")
    assert serious_event(accessed) is None
    assert serious_event(failed) == r"request_failed: a\x1b[2Jb\u2028c: engine_error: it is\nso"


NAMES_REQUESTS = """
import asyncio, logging
from tercet import logs
from tercet.logs import FIELDS, access_logger, lines_of_request, log_to_stderr

log_to_stderr("info", "{form}", access=True)

async def begun_meanwhile():
    logging.getLogger("tercet.router").warning("in a task")

async def main():
    with lines_of_request("mine-1"):
        logs.RETRY.tell(seq_id="s", program="p", tokens=3, reason="r")
        access_logger.info("GET", extra={{FIELDS: {{"status": 200}}}})
        task = asyncio.create_task(begun_meanwhile())
    await task
    with lines_of_request("x" * 1_000_000 + "\\n"):
        logging.getLogger("tercet.router").warning("long")
    logging.getLogger("tercet.router").warning("of nobody")

asyncio.run(main())
"""


@pytest.mark.processes
def test_each_line_of_a_request_names_it() -> None:
    *named, long, other = said_as_json(NAMES_REQUESTS.format(form="json"))
    assert [line["request_id"] for line in named] == ["mine-1"] * 3
    assert 128 <= len(long["request_id"]) < 140
    assert "request_id" not in other
    script = NAMES_REQUESTS.format(form="text")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert [line.endswith(" [x-request-id mine-1]") for line in said.splitlines()] == [True] * 3 + [False] * 2
    assert max(map(len, said.splitlines())) < 300


# ---- how much is written ---------------------------------------------------------------------------------------------


class Written(logging.Handler):
    """Keeps what is written; ``now`` is the clock of its bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[str] = []
        self.setFormatter(TextLines("%(message)s"))
        self.addFilter(LineBounds(lambda: self.now))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def logger_to(written: Written, name: str) -> logging.Logger:
    logger = logging.Logger(name)
    logger.addHandler(written)
    return logger


def test_a_line_is_no_longer_than_this() -> None:
    written = Written()
    logger = logger_to(written, "tercet.router")
    logger.warning("it says %s", "x" * 10_000_000)
    logger.warning("%s" % ("%s" * 10_000))
    try:
        raise ValueError("y" * 10_000_000)
    except ValueError:
        logger.exception("it failed")
    assert [len(line) <= LONGEST_LINE + 100 for line in written.lines[:2]] == [True, True]
    assert "(10000008 characters)" in written.lines[0]
    assert LONGEST_TRACEBACK / 2 < len(written.lines[2]) < LONGEST_TRACEBACK + 100
    assert written.lines[2].startswith("it failed\nTraceback")


def test_whoever_provokes_a_line_does_not_choose_how_many_there_are() -> None:
    written = Written()
    logger = logger_to(written, "tercet.router")

    def provoke(number: int) -> None:
        for _ in range(number):
            logger.warning("provoked")

    provoke(MOST_LINES + 7)
    logger.warning("something else")
    assert written.lines == [*["provoked"] * MOST_LINES, "something else"]
    written.now += WITHIN_SECONDS
    provoke(2)
    assert written.lines[-2:] == ["provoked (and 7 more of this kind before)", "provoked"]


@pytest.mark.parametrize("name", [EVENTS, access_logger.name])
def test_lines_that_are_asked_for_are_all_written(name: str) -> None:
    written = Written()
    logger = logger_to(written, name)
    for _ in range(2 * MOST_LINES):
        logger.info("asked for")
    assert len(written.lines) == 2 * MOST_LINES


@pytest.mark.processes
def test_both_forms_have_the_bounds() -> None:
    script = """
import logging
from tercet.logs import log_to_stderr

log_to_stderr("info", FORM)
for _ in range(1000):
    logging.getLogger("tercet.router").warning("x" * 100_000)
"""
    for form in ("text", "json"):
        argv = [sys.executable, "-c", script.replace("FORM", repr(form))]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
        assert len(said) < (MOST_LINES + 1) * (LONGEST_LINE + 300)
