"""The access log's line of a generation that an engine's scheduler ends, in no task of the request."""

from __future__ import annotations

from typing import Any

import pytest

from tercet.engine.verbs import DecodingSequence
from tercet.logs import LoggedGeneration, lines_of_request
from tercet.protocol import BadRequest, Output, Usage


def test_a_generation_is_logged_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tercet.access")
    request: Any = type("Request", (), {"num_cached": 0})()
    with lines_of_request("mine"):
        done, broken, left = (
            DecodingSequence(name, 1, request, [1, 2, 3], lambda _: Usage(), lambda _: None, "small")
            for name in ("a", "b", "c")
        )
    done.counted(Output((5, 6)))
    done.counted(Output((7,), "stop"))
    done.end()
    done.end()
    with pytest.raises(BadRequest), broken.ended():
        raise BadRequest("no", "x")
    left.counted(Output((5,)))
    left.end()
    found: list[dict[str, Any]] = [getattr(record, "tercet_fields") for record in caplog.records]  # noqa: B009
    assert [(each["seq_id"], each["status"], each["prompt_tokens"], each["output_tokens"]) for each in found] == [
        ("a", 200, 3, 3), ("b", 400, 3, 0), ("c", 0, 3, 1),
    ]  # fmt: skip
    assert {(each["request_id"], each["model"]) for each in found} == {("mine", "small")}
    LoggedGeneration("d", "small", 1).over(200, 2)
    assert caplog.messages[-1].endswith("model small, 1 + 2 tokens")
