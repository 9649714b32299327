"""Commands before a server that says what no router says: one line of complaint, and nothing for the terminal."""

from __future__ import annotations

import http.server
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.cli import app, router_calls
from tercet.cli.terminal import printable, write
from tests.servers import served_in_thread

Captured = pytest.CaptureFixture[str]
COMMANDS = [
    ("engines", "add", "a", "http://127.0.0.1:1"), ("engines", "drain", "a"),
    ("engines", "drain", "a", "--wait"), ("engines", "remove", "a"), ("engines", "role", "a", "both"),
    ("program",), ("program", "balanced"), ("program", "balanced=1"),
    ("status", "--moves"), ("status", "--sequences"), ("engines", "move", "a", "b"),
    ("engines", "adapters"), ("engines", "adapters", "a=/b"), ("engines", "adapters", "a=/b", "--replace"), ("status",),
]  # fmt: skip
VERSION: dict[str, Any] = {"version": 1, "failures_in_a_row": {}, "returned": None, "previous": None}
SHAPES: list[Any] = [
    None, 7, "text", [], {}, [7], ["text"], [None], [[]], [{}], {"name": 7}, [{"name": 7}], {"data": []},
    {"program": 7, "serving": 1, "models": 7, "why": 7, "engines": 7, "moves": 7},
    {**VERSION, "failures_in_a_row": 7}, {**VERSION, "returned": 7}, {**VERSION, "split": 7},
    {**VERSION, "split": [{"weight": 0, "program": "p"}]},
    [{"number": 1, "seq_id": 1, "source": 1, "destination": 1, "reason": 1, "outcome": 1, "stages": 7}],
    [{"name": "a", "role": 7, "draining": 7}], {"in_flight": "many", "name": "a"},
]  # fmt: skip
STREAMS = [b"data: 7\n\n", b"data: {\n\n", b'data: {"choices": 7}\n\n', b'data: {"error": 7}\n\n', b'{"data": [7]}']


class Liar(http.server.ThreadingHTTPServer):
    """Answers everything with ``said``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.said = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        assert isinstance(self.server, Liar)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.said)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    server = Liar()
    with served_in_thread(server):
        yield server


@pytest.fixture(autouse=True)
def one_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other fleets may run on this machine, and then commands would ask which one is meant."""
    monkeypatch.setenv("TERCET_URL", "http://127.0.0.1:8000")


def one_complaint(code: int, said: str) -> bool:
    return code in (0, 1) and said.count("\n") <= 1 and (not said or said.startswith("tercet: "))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_answer_of_another_shape_is_no_traceback(
    command: tuple[str, ...], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape: Any = None

    def answer(*_: Any) -> Any:
        return shape

    monkeypatch.setattr(router_calls, "ask_router", answer)
    for shape in SHAPES:
        assert one_complaint(app._run([*command]), capsys.readouterr().err), shape


def test_a_stream_of_another_shape_is_no_traceback(
    liar: Liar, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for liar.said in STREAMS:
        for more in ((), ("--model", "m")):
            monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
            assert one_complaint(app._run(["chat", "--url", liar.url, *more]), capsys.readouterr().err), liar.said


ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x00\u202e"


def test_what_others_say_does_not_move_the_cursor(
    liar: Liar, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar.said = json.dumps({"error": {"message": ESCAPES, "code": "x"}}).encode()
    engine = {
        "name": ESCAPES, "role": ESCAPES, "draining": False, "stopping": False, "reachable": True, "in_flight": 0,
        "url": ESCAPES, "report": None, "refused": "",
    }  # fmt: skip
    serving = {
        "serving": True, "models": ["m"], "why": "", "program": {**VERSION, "program": "p"}, "engines": [engine],
        "moves": [], "roles": "fixed",
        "objectives": {"ttft": None, "tpot": None, "share": 0.99, "attainment": None, "requests": 0},
    }  # fmt: skip
    chunk = {"choices": [{"delta": {"content": f"a\n\tb{ESCAPES}"}}]}
    lies = {
        ("status",): json.dumps(serving),
        ("program",): json.dumps({"error": {"message": ESCAPES}}),
        ("chat", "--model", "m"): f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n",
    }
    for command, lie in lies.items():
        liar.said = lie.encode()
        monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
        app._run([*command, "--url", liar.url])
        shown = capsys.readouterr()
        both = shown.out + shown.err
        assert not {*both} & {*ESCAPES} - {*"]0;title[2J31m"}
        assert "x1b" in both or command == ("program",)
        assert command[0] != "chat" or "a\n\tb" in shown.out


def test_lines_and_tabs_and_words_stay(capsys: Captured) -> None:
    text = "a\tb\nc \u00e9 \U0001f600 \u05d0"
    assert printable(text) == text
    write(text)
    assert capsys.readouterr().out == text
