"""Pictures, videos and sound in prompts on two real engines: wherever it is computed, the tokens are the same."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tercet.wire.client import HttpEngine
from tests.engines.conftest import Fleet, get_json, settled, start_fleet
from tests.engines.moving import answer_of, ask, moving, until
from tests.engines.processes import processes_of, send_signal
from tests.engines.prompts import BLOCK, calls_of, chat, complete, tokens_of

from .features import FEATURE_FAMILIES, FeatureFamily
from .record import Record, noted

TRACE = {"x-tercet-trace": "1"}
FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
CONTEXT_FIRST = f"{Path(__file__).parent / 'context_first.py'}:context_first"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Served:
    """Two engines of a family behind a router, what the model is called there, and what was shown of it."""

    family: FeatureFamily
    fleet: Fleet
    model: str
    record: Record

    def content(self, *numbers: int, text: str = "What is the difference?") -> list[dict[str, Any]]:
        """A message of pictures or the like and a question."""
        return [*(self.family.part(number) for number in numbers), {"type": "text", "text": text}]

    async def ask(self, *numbers: int, program: str = "", text: str = "", **fields: Any) -> dict[str, Any]:
        """What the router answers to such a message."""
        headers = TRACE | ({"x-tercet-program": program} if program else {})
        content = self.content(*numbers, **({"text": text} if text else {}))
        return await chat(self.fleet.url, content, headers, model=self.model, **fields)


@pytest.fixture(scope="module", params=list(FEATURE_FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    family = FEATURE_FAMILIES[request.param]
    args = (
        "--program-arg", "min_send=1", "--", "--max-model-len", "1024", "--max-num-batched-tokens", "256",
        "--limit-mm-per-prompt", f'{{"{family.modality}": 3}}',
    )  # fmt: skip
    tmp = tmp_path_factory.mktemp(request.param)
    with noted(request.param) as record:
        with family.needing():
            fleet = start_fleet(tmp, *args, model=str(family.checkpoint()))
        try:
            yield Served(family, fleet, get_json(f"{fleet.url}/v1/models")["data"][0]["id"], record)
        finally:
            fleet.stop()


def of_families(*names: str) -> pytest.MarkDecorator:
    """A test of what is the same for all families, or is asked of some only."""
    return pytest.mark.parametrize("served", names, indirect=True)


async def test_same_tokens_as_one_engine(served: Served) -> None:
    fleet, model = served.fleet, served.model
    expected = {
        numbers: tokens_of(
            await chat(fleet.engine_url("prefill"), served.content(*numbers), model=model, cache_salt="alone", **FIELDS)
        )
        for numbers in ((1,), (2,), (1, 2), (2, 1))
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    for program in ("data_parallel", "disaggregated", "balanced"):
        salt = uuid.uuid4().hex  # what another one has left behind may be found, if anybody mistakes it
        for numbers, tokens in expected.items():
            answer = await served.ask(*numbers, program=program, cache_salt=salt, **FIELDS)
            assert tokens_of(answer) == tokens, (program, numbers)
            if program != "data_parallel":
                assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]
        if program != "data_parallel":
            served.record.ran(program)


async def test_what_was_sent_is_found_with_the_same_one_only(served: Served) -> None:
    fields: dict[str, Any] = {"cache_salt": uuid.uuid4().hex, **FIELDS}

    async def cached(*numbers: int, text: str) -> int:
        answer = await served.ask(*numbers, text=text, **fields)
        return next(each for each in answer["tercet"]["events"] if each["verb"] == "prep_recv").get("cached", 0)

    assert served.family.tokens > BLOCK
    assert await cached(1, text="What is this?") == 0
    assert await cached(2, text="What is this?") == 0
    assert await cached(1, text="And what else is there?") == BLOCK
    assert await cached(1, 2, text="And what else is there?") == BLOCK
    assert await cached(1, 3, text="And what else is there?") == BLOCK
    assert await cached(1, 2, text="And then?") == 2 * BLOCK


async def test_context_that_was_sent_is_there_for_whoever_comes_later(served: Served) -> None:
    plan = {
        "program": "disaggregated", "args": {"min_send": 1},
        "rules": [{"header": "x-team", "value": "none", "program": CONTEXT_FIRST, "name": "context_first"}],
    }  # fmt: skip
    status, answer = await ask(served.fleet, "PUT", "/program", json=plan)
    assert status == 200, answer
    expected = tokens_of(
        await chat(
            served.fleet.engine_url("prefill"), served.content(8, 9), model=served.model, cache_salt="alone", **FIELDS
        )
    )
    answer = await served.ask(8, 9, program="context_first", cache_salt=uuid.uuid4().hex, **FIELDS)
    assert tokens_of(answer) == expected
    assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]
    started = answer["tercet"]["events"][-1]
    assert started["engine"] == "decode-0"
    assert started["computed"] == answer["usage"]["prompt_tokens"] % BLOCK
    served.record.ran("migration of context")


async def test_moves(served: Served) -> None:
    calm = await served.ask(4, 5, program="data_parallel", cache_salt=uuid.uuid4().hex, **LONG)
    async with moving(served.fleet) as moved:
        answer = await served.ask(4, 5, program="data_parallel", cache_salt=uuid.uuid4().hex, **LONG)
    assert tokens_of(answer) == tokens_of(calm)
    assert len(moved) >= 2
    served.record.ran("live moves")


async def test_text_alone(served: Served) -> None:
    fleet, model = served.fleet, served.model
    prompt = list(range(1000, 1300))
    expected = await complete(fleet.engine_url("prefill"), prompt, model=model, cache_salt="alone", **FIELDS)
    for program in ("disaggregated", "balanced"):
        salt = uuid.uuid4().hex
        answer = await complete(
            fleet.url, prompt, {**TRACE, "x-tercet-program": program}, model=model, cache_salt=salt, **FIELDS
        )
        assert answer_of(answer) == answer_of(expected)
        assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]


@of_families("idefics3")
@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:9/x.png", "allowed domains"), ("data:image/png;base64,AA", "base64"), ("gopher://x/", "URL")],
)
async def test_what_is_no_picture_here(served: Served, url: str, said: str) -> None:
    with pytest.raises(AssertionError) as refused:
        await chat(served.fleet.url, [{"type": "image_url", "image_url": {"url": url}}], model=served.model)
    error = refused.value.args[0]["error"]
    assert error["code"] == "bad_request", error
    assert said.lower() in error["message"].lower(), error


async def test_too_many(served: Served) -> None:
    with pytest.raises(AssertionError) as refused:
        await served.ask(1, 2, 3, 4)
    assert refused.value.args[0]["error"]["code"] == "bad_request"


async def test_failover(served: Served) -> None:
    """The engine that decodes dies after some tokens, and the other one, which has nothing of it, goes on."""
    fleet = served.fleet
    for role in ("prefill", "decode"):
        async with HttpEngine(role, fleet.engine_url(role)) as engine:
            await settled(engine)
    fields: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
    calm = await served.ask(6, 7, cache_salt=uuid.uuid4().hex, **fields)
    asking = asyncio.create_task(served.ask(6, 7, cache_salt=uuid.uuid4().hex, **fields))
    await until(fleet, lambda running: any(each["engine"] == "decode-0" and each["tokens"] > 5 for each in running))
    send_signal(processes_of(fleet.engine_url("decode")), signal.SIGKILL)
    answer = await asking
    assert tokens_of(answer) == tokens_of(calm)
    assert answer["tercet"]["events"][-1]["engine"] == "prefill-0"
    served.record.ran("failover after tokens")
