"""`tercet chat` against a server in this process: through a pipe, at a prompt, and what goes wrong."""

from __future__ import annotations

import http.server
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.cli import app
from tercet.cli import chat as chat_module
from tercet.cli.app import NOBODY_READS
from tests.servers import served_in_thread

from .closed_output import with_nobody_reading

Captured = pytest.CaptureFixture[str]


class LiveRouter(http.server.ThreadingHTTPServer):
    """Answers with ``texts``, one event each; ``error`` is what the stream ends with instead of its end mark."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.texts = ["Good ", "day."]
        self.error: str | None = None
        self.finish_reason = "stop"
        self.status = 200
        self.breaks_off = False
        self.missing_bytes = 0  # of what the head announces, when the connection ends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    @property
    def router(self) -> LiveRouter:
        assert isinstance(self.server, LiveRouter)
        return self.server

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self) -> None:
        self.router.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if self.router.status != 200:
            self._answer(b'{"error": {"message": "not now"}}')
            return
        events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in self.router.texts]
        events.append({"choices": [{"delta": {}, "finish_reason": self.router.finish_reason}]})
        if self.router.error:
            events.append({"error": {"message": self.router.error}})
        lines = [f"data: {json.dumps(event)}" for event in events]
        if not self.router.breaks_off:
            lines.append("data: [DONE]")
        self._answer("\n\n".join([*lines, ""]).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(self.router.status)
        self.send_header("content-length", str(len(body) + self.router.missing_bytes))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def router() -> Iterator[LiveRouter]:
    router = LiveRouter()
    with served_in_thread(router):
        yield router


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What is typed at the prompt; an exception is a key such as Ctrl-C."""
    left = list(lines)

    def read(_: str) -> str:
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_answer_quietly(router: LiveRouter) -> None:
    ended = with_nobody_reading(["chat", "--url", router.url], "hello\n")
    assert (ended.returncode, ended.stderr) == (NOBODY_READS, "")


def test_a_question_through_a_pipe(router: LiveRouter, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    piped(monkeypatch, "hello\n")
    assert app._run(["chat", "--url", router.url, "--max-tokens", "5", "--system", "be short"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("Good day.\n", "")
    assert router.asked == [
        {
            "model": "the-model", "max_tokens": 5, "stream": True,
            "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}],
        }
    ]  # fmt: skip


def test_an_answer_has_a_bound_and_says_that_it_was_cut(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    router.finish_reason = "length"
    piped(monkeypatch, "hello\n")
    assert app._run(["chat", "--url", router.url]) == 0
    typed(monkeypatch, "hello", EOFError)
    assert app._run(["chat", "--url", router.url, "--max-tokens", "7"]) == 0
    said = capsys.readouterr()
    assert [each["max_tokens"] for each in router.asked] == [256, 7]
    assert "(cut after 256 tokens; --max-tokens sets another limit)" in said.err
    assert "(cut after 7 tokens" in said.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "url", "code"), [("", None, 2), ("\udcff", None, 2), ("x", "nonsense", 2), ("x", "http://127.0.0.1:9", 1)]
)
def test_wrong_use(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, capsys: Captured, text: str, url: str | None, code: int
) -> None:
    piped(monkeypatch, text)
    assert app._run(["chat", "--url", url or router.url]) == code
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("error", "the engine is gone", "the engine is gone"), ("status", 503, "not now"),
     ("breaks_off", True, "the connection closed before the answer ended"),
     ("missing_bytes", 9, "the router's answer was interrupted")],
)  # fmt: skip
def test_an_answer_that_fails_fails_the_command(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, capsys: Captured, field: str, value: Any, expected: str
) -> None:
    setattr(router, field, value)
    piped(monkeypatch, "hello")
    assert app._run(["chat", "--url", router.url, "--model", "m"]) == 1
    assert expected in capsys.readouterr().err


def test_a_conversation_has_a_memory_and_ctrl_d_ends_it(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    typed(monkeypatch, "hello", "", "and you?", EOFError)
    assert app._run(["chat", "--url", router.url]) == 0
    assert capsys.readouterr().out == "Good day.\nGood day.\n\n"
    assert [message["content"] for message in router.asked[1]["messages"]] == ["hello", "Good day.", "and you?"]


def test_ctrl_c_ends_the_answer_and_a_second_one_the_chat(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text == "Good " and shown.count(text) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "write", show)
    typed(monkeypatch, "hello", "go on", KeyboardInterrupt)
    assert app._run(["chat", "--url", router.url]) == 0
    assert [message["content"] for message in router.asked[1]["messages"]] == ["hello", "Good ", "go on"]


def test_an_answer_that_fails_does_not_end_the_chat(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router.error, router.texts = "busy", []
    typed(monkeypatch, "hello", "again", EOFError)
    assert app._run(["chat", "--url", router.url]) == 0
    assert [message["content"] for message in router.asked[1]["messages"]] == ["again"]
