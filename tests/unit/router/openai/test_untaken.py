"""What waits in vLLM's layer for a client that does not read is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from tercet.protocol import DeadlineExceeded
from tercet.router.openai import program_client
from tercet.router.openai.program_client import ProgramClient


def waiting(tokens: int, logprobs: int = 0) -> RequestOutput:
    at: Any = [dict.fromkeys(range(logprobs))] * tokens if logprobs else None
    choice = CompletionOutput(0, "", [1] * tokens, None, at)
    return RequestOutput("r", None, [1], None, [choice], finished=False)


def client_of(output: object) -> ProgramClient:
    programs: Any = None
    client = ProgramClient(programs)
    processor: Any = SimpleNamespace(request_states={"r": SimpleNamespace(queue=SimpleNamespace(output=output))})
    client.attach(processor)
    return client


@pytest.mark.parametrize("output", [None, waiting(100), waiting(25, 3), ValueError("an error")], ids=str)
async def test_what_is_taken_in_time_goes_on(output: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_client, "MOST_UNTAKEN", 100)
    client_of(output)._require_taken("r")
    client_of(output)._require_taken("somebody else")


@pytest.mark.parametrize("output", [waiting(101), waiting(26, 3)], ids=["tokens", "log probabilities"])
async def test_a_sequence_whose_client_does_not_read_ends(output: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_client, "MOST_UNTAKEN", 100)
    with pytest.raises(DeadlineExceeded, match="does not read"):
        client_of(output)._require_taken("r")
