"""`tercet top`: what keys do to the view, and that the terminal is left as it was."""

from __future__ import annotations

import http.server
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tercet.cli.top import FleetView, Latest, Row, drawn, rows_of
from tercet.protocol import EngineUnreachable
from tests.longest_wait import LONGEST_WAIT_S
from tests.servers import SHUTDOWN_POLL_S


def engine(name: str, running: int | None, **other: Any) -> dict[str, Any]:
    report = None if running is None else {
        "running": running, "waiting": 0, "kv_usage": running / 10, "step_time": 0.01, "age": 0.1,
    }  # fmt: skip
    return {
        "name": name, "role": "decode", "draining": False, "stopping": False, "reachable": True, "refused": "",
        "in_flight": running or 0, "report": report, **other,
    }  # fmt: skip


ENGINES = [engine("b", 3), engine("a", 9), engine("c", None, reachable=False), engine("d", 3, draining=True)]
STATUS: dict[str, Any] = {
    "models": ["m"], "serving": True, "program": {"program": "disaggregated"}, "moves": [], "engines": ENGINES,
}  # fmt: skip


def pressed(keys: str, view: FleetView | None = None) -> FleetView | None:
    view = view or FleetView()
    for key in keys:
        if view is None:
            return None
        view = view.after(key)
    return view


def names(view: FleetView | None) -> list[str]:
    assert view is not None
    return [row.name for row in view.shown(rows_of(STATUS))]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", ["a", "b", "c", "d"]),
        ("r", ["d", "c", "b", "a"]),
        ("ssss", ["a", "b", "d", "c"]),  # the unknown one comes last, however it is sorted
        ("ssssr", ["b", "d", "a", "c"]),
        ("/drain\r", ["d"]),
        ("/xyz\x1b", ["a", "b", "c", "d"]),
        ("/bx\x7f\r", ["b", "c"]),  # c is unreachable
        ("/unreach", ["c"]),
    ],
)
def test_keys_sort_and_filter(keys: str, expected: list[str]) -> None:
    assert names(pressed(keys)) == expected


@pytest.mark.parametrize("keys", ["q", "\x03", "/a\x03", "/q\rq"])
def test_keys_that_end_it(keys: str) -> None:
    assert pressed(keys) is None


def test_a_q_of_a_filter_is_a_letter() -> None:
    view = pressed("/q")
    assert view is not None
    assert view.filter == "q"


def test_what_does_not_fit_is_counted_and_names_are_printable() -> None:
    status = {**STATUS, "engines": [engine(f"e\x1b[31m{number}", 1) for number in range(50)]}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(drawn(status, FleetView(), 20))
    text = console.export_text()
    assert "34 more do not fit" in text
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_a_row_has_what_the_engine_reported() -> None:
    assert rows_of(STATUS)[0] == Row("b", "decode", "serving", 3, 3, 0, 0.3, 0.01)


def text_of(status: dict[str, Any], away: str = "") -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(drawn(status, FleetView(), 20, away))
    return console.export_text()


def test_the_head_has_rates_and_says_that_the_router_is_away() -> None:
    recent = {"seconds": 10.0, "requests": 4.12, "tokens": 1050.2, "failures": 0.2, "refusals": 0.0, "ttft_p50": 0.0541}
    head = text_of({**STATUS, "recent": recent}).splitlines()[:2]
    assert head[0].startswith("m  serves  disaggregated")
    assert head[1].rstrip() == "4.1 requests/s, 1050 tokens/s, TTFT 54 ms, 0.2 failures/s, 0.0 refusals/s"
    away = text_of(STATUS, "no router answers since 12 s")
    assert "serves" not in away
    assert away.startswith("m  no router answers since 12 s  disaggregated")


def test_polls_go_on_while_the_router_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.cli.top.EVERY", 0.001)
    answers: list[dict[str, Any] | None] = [STATUS, None, None, {**STATUS, "serving": False}]
    asked, away = threading.Event(), threading.Event()

    def look() -> dict[str, Any]:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not asked.is_set():
            asked.set()
        elif found is None:
            raise EngineUnreachable("gone")
        else:
            assert away.wait(LONGEST_WAIT_S)
        return found or STATUS

    latest = Latest(look)
    try:
        deadline = time.monotonic() + LONGEST_WAIT_S
        while not latest.away:
            assert time.monotonic() < deadline
        assert latest.away.startswith("no router answers since ")
        away.set()
        while latest.away or latest.status["serving"]:
            assert time.monotonic() < deadline
        assert latest.trouble == ""
    finally:
        latest.end()


# ---- in a terminal -----------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(STATUS).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(SHUTDOWN_POLL_S,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def read_until(descriptor: int, text: bytes) -> bytes:
    found, deadline = b"", time.monotonic() + 60
    while text not in found:
        assert time.monotonic() < deadline, found[-2000:]
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                found += os.read(descriptor, 65536)
            except OSError:
                break
    return found


@pytest.mark.processes
@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_the_terminal_is_left_as_it_was(url: str, end: bytes) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet.cli", "top", "--url", url], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
    )  # fmt: skip
    try:
        seen = read_until(ours, b"unreachable")
        assert b"\x1b[?1049h" in seen
        os.write(ours, b"/drain")
        read_until(ours, b"filter: drain")
        os.write(ours, b"\r" + end)
        assert b"\x1b[?1049l" in read_until(ours, b"\x1b[?1049l")
        assert process.wait(LONGEST_WAIT_S) == (0 if end == b"q" else 130)
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
