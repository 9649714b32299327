"""An engine's access log: a line for each call of a verb, with its request, its tokens and what became of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tercet.protocol import BadRequest, NoSpace, Output, Usage
from tercet.protocol.wire import PrepRecvCall
from tercet.settings.log_lines import request_id
from tercet.vllm_plugin.engine import verb_log
from tercet.vllm_plugin.engine.llm_requests import DecodingSequence
from tercet.vllm_plugin.engine.verb_log import log_as_the_environment_says, log_generation, logged_call

CALL = PrepRecvCall(prompt=[1, 2, 3], seq_id="cmpl-mine-0")


@pytest.fixture(autouse=True)
def access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(record, "tercet_fields") for record in caplog.records]  # noqa: B009


def test_a_call_is_logged_with_its_status(caplog: pytest.LogCaptureFixture) -> None:
    with logged_call("prep_recv", CALL, {"x-request-id": "mine"}):
        assert request_id() == "mine"
    with pytest.raises(NoSpace), logged_call("prep_recv", CALL, {}):
        raise NoSpace("full")
    with pytest.raises(KeyboardInterrupt), logged_call("prep_recv", CALL, {}):
        raise KeyboardInterrupt
    assert [each["status"] for each in fields(caplog)] == [200, NoSpace("full").status, 0]
    assert {(each["seq_id"], each["prompt_tokens"]) for each in fields(caplog)} == {("cmpl-mine-0", 3)}
    assert caplog.messages[0].startswith("prep_recv cmpl-mine-0 200 in 0.")


def test_a_generation_is_logged_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    request: Any = type("Request", (), {"num_cached": 0})()
    done, broken, left = (
        DecodingSequence(name, 1, request, [1, 2, 3], lambda _: Usage(), lambda _: None) for name in ("a", "b", "c")
    )
    done.told(Output((5, 6)))
    done.told(Output((7,), "stop"))
    done.end()
    done.end()
    with pytest.raises(BadRequest), broken.ended():
        raise BadRequest("no", "x")
    left.told(Output((5,)))
    left.end()
    found = fields(caplog)
    assert [(each["seq_id"], each["status"], each["prompt_tokens"], each["output_tokens"]) for each in found] == [
        ("a", 200, 3, 3), ("b", 400, 3, 0), ("c", 0, 3, 1),
    ]  # fmt: skip
    log_generation("d", time.monotonic(), 200, 1, 2)
    assert caplog.messages[-1].endswith("1 + 2 tokens")


@pytest.mark.parametrize(("access", "form", "wanted"), [("1", "json", ("json", True)), ("", "", ("text", False))])
def test_variables_say_what_is_logged(
    access: str, form: str, wanted: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(verb_log, "log_to_stderr", lambda *args: told.append(args))
    monkeypatch.setenv("TERCET_ACCESS_LOG", access)
    monkeypatch.setenv("TERCET_LOG_FORMAT", form)
    log_as_the_environment_says("info")
    assert told == [("info", *wanted)]


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_LOG_FORMAT", "xml")
    with pytest.raises(BadRequest, match="TERCET_LOG_FORMAT"):
        log_as_the_environment_says("info")
