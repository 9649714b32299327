"""An engine's access log: a line for each call of a verb, with its request, its tokens and what became of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tercet import logs
from tercet.logs import LoggedGeneration, lines_of_request, log_as_the_environment_says, logged_call, request_id
from tercet.protocol import BadRequest, NoSpace, Output, OutputStream
from tercet.protocol.wire import PrepRecvCall

CALL = PrepRecvCall(prompt=[1, 2, 3], seq_id="cmpl-mine-0")


@pytest.fixture(autouse=True)
def access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(record, "tercet_fields") for record in caplog.records]  # noqa: B009


def test_a_call_is_logged_with_its_status(caplog: pytest.LogCaptureFixture) -> None:
    with logged_call("prep_recv", CALL, {"x-request-id": "mine"}, "small"):
        assert request_id() == "mine"
    with pytest.raises(NoSpace), logged_call("prep_recv", CALL, {}, "small"):
        raise NoSpace("full")
    with pytest.raises(KeyboardInterrupt), logged_call("prep_recv", CALL, {}, "small"):
        raise KeyboardInterrupt
    assert [each["status"] for each in fields(caplog)] == [200, NoSpace("full").status, 0]
    assert {(each["seq_id"], each["prompt_tokens"]) for each in fields(caplog)} == {("cmpl-mine-0", 3)}
    assert {each["model"] for each in fields(caplog)} == {"small"}
    assert caplog.messages[0].startswith("prep_recv cmpl-mine-0 200 in 0.")


async def test_what_a_stream_generates_is_logged_as_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def two_tokens(stream: OutputStream) -> None:
        stream.put(Output((5, 6)))
        if request_id() == "broken":
            raise NoSpace("full")
        stream.put(Output((), "stop"))

    for named, error in (("whole", None), ("broken", NoSpace)):
        with lines_of_request(named), pytest.raises(error) if error else nullcontext():
            outputs = OutputStream(two_tokens)
            outputs.subscribe(LoggedGeneration("e", "small", 4))
            await outputs.run(lambda _: None)
    found = [(each["request_id"], each["status"], each["output_tokens"]) for each in fields(caplog)]
    assert found == [("whole", 200, 2), ("broken", NoSpace("full").status, 2)]


@pytest.mark.parametrize(("access", "form", "wanted"), [("1", "json", ("json", True)), ("", "", ("text", False))])
def test_variables_say_what_is_logged(
    access: str, form: str, wanted: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(logs, "log_to_stderr", lambda *args: told.append(args))
    monkeypatch.setenv("TERCET_ACCESS_LOG", access)
    monkeypatch.setenv("TERCET_LOG_FORMAT", form)
    log_as_the_environment_says("info")
    assert told == [("info", *wanted)]


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_LOG_FORMAT", "xml")
    with pytest.raises(BadRequest, match="TERCET_LOG_FORMAT"):
        log_as_the_environment_says("info")
