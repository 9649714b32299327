"""Pictures in prompts on two real engines: wherever it is computed, a request gets the tokens of one engine alone."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Generator
from typing import Any

import pytest

from tercet.client import HttpEngine
from tests.engines.conftest import Fleet, get_json, settled, start_fleet
from tests.engines.moving import answer_of, moving, until
from tests.engines.processes import processes_of, send_signal
from tests.engines.prompts import BLOCK, calls_of, chat, complete, tokens_of

from .images import TOKENS_PER_IMAGE, picture, vision_checkpoint

TRACE = {"x-tercet-trace": "1"}
FIELDS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Fleet, str]]:
    """Two engines of a vision-language model behind a front door, and what the model is called there."""
    args = (
        "--program-arg", "min_send=1", "--", "--max-model-len", "1024", "--max-num-batched-tokens", "256",
        "--limit-mm-per-prompt", '{"image": 3}',
    )  # fmt: skip
    fleet = start_fleet(tmp_path_factory.mktemp("images"), *args, model=str(vision_checkpoint()))
    try:
        yield fleet, get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    finally:
        fleet.stop()


def asked(*seeds: int, text: str = "What is the difference?") -> list[dict[str, Any]]:
    """A message of pictures and a question."""
    parts = [{"type": "image_url", "image_url": {"url": picture(seed)}} for seed in seeds]
    return [*parts, {"type": "text", "text": text}]


async def test_same_tokens_as_one_engine(pictures: tuple[Fleet, str]) -> None:
    fleet, model = pictures
    expected = {
        seeds: tokens_of(
            await chat(fleet.engine_url("prefill"), asked(*seeds), model=model, cache_salt="alone", **FIELDS)
        )
        for seeds in ((1,), (2,), (1, 2), (2, 1))
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    for program in ("data_parallel", "disaggregated", "balanced"):
        salt = uuid.uuid4().hex  # what another picture has left behind may be found, if anybody mistakes it
        for seeds, tokens in expected.items():
            answer = await chat(
                fleet.url, asked(*seeds), {**TRACE, "x-tercet-program": program}, model=model, cache_salt=salt, **FIELDS
            )
            assert tokens_of(answer) == tokens, (program, seeds)
            if program != "data_parallel":
                assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]


async def test_what_was_sent_is_found_with_the_same_picture_only(pictures: tuple[Fleet, str]) -> None:
    fleet, model = pictures
    fields: dict[str, Any] = {"model": model, "cache_salt": uuid.uuid4().hex, **FIELDS}
    headers = {**TRACE, "x-tercet-program": "disaggregated"}

    async def cached(*seeds: int, text: str) -> int:
        answer = await chat(fleet.url, asked(*seeds, text=text), headers, **fields)
        return next(each for each in answer["tercet"]["events"] if each["verb"] == "prep_recv").get("cached", 0)

    assert TOKENS_PER_IMAGE > BLOCK
    assert await cached(1, text="What is this?") == 0
    assert await cached(2, text="What is this?") == 0
    assert await cached(1, text="And what else is there?") == BLOCK
    assert await cached(1, 2, text="And what else is there?") == BLOCK
    assert await cached(1, 3, text="And what else is there?") == BLOCK
    assert await cached(1, 2, text="And then?") == 2 * BLOCK


async def test_moves(pictures: tuple[Fleet, str]) -> None:
    fleet, model = pictures
    headers = {"x-tercet-program": "data_parallel"}
    calm = await chat(fleet.url, asked(4, 5), headers, model=model, cache_salt=uuid.uuid4().hex, **LONG)
    async with moving(fleet) as moved:
        answer = await chat(fleet.url, asked(4, 5), headers, model=model, cache_salt=uuid.uuid4().hex, **LONG)
    assert tokens_of(answer) == tokens_of(calm)
    assert len(moved) >= 2


async def test_text_alone(pictures: tuple[Fleet, str]) -> None:
    fleet, model = pictures
    prompt = list(range(1000, 1300))
    expected = await complete(fleet.engine_url("prefill"), prompt, model=model, cache_salt="alone", **FIELDS)
    for program in ("disaggregated", "balanced"):
        salt = uuid.uuid4().hex
        answer = await complete(
            fleet.url, prompt, {**TRACE, "x-tercet-program": program}, model=model, cache_salt=salt, **FIELDS
        )
        assert answer_of(answer) == answer_of(expected)
        assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/x.png", "allowed domains"),
        ("data:image/png;base64,AA", "base64"),
        ("gopher://x/", "URL"),
    ],
)
async def test_what_is_no_picture_here(pictures: tuple[Fleet, str], url: str, said: str) -> None:
    fleet, model = pictures
    with pytest.raises(AssertionError) as refused:
        await chat(fleet.url, [{"type": "image_url", "image_url": {"url": url}}], model=model)
    error = refused.value.args[0]["error"]
    assert error["code"] == 400, error
    assert said.lower() in error["message"].lower(), error


async def test_too_many_pictures(pictures: tuple[Fleet, str]) -> None:
    fleet, model = pictures
    with pytest.raises(AssertionError) as refused:
        await chat(fleet.url, asked(1, 2, 3, 4), model=model)
    assert refused.value.args[0]["error"]["code"] == "bad_request"


async def test_failover(pictures: tuple[Fleet, str]) -> None:
    """The engine that decodes dies after some tokens, and the other one, which has nothing of it, goes on."""
    fleet, model = pictures
    for role in ("prefill", "decode"):
        async with HttpEngine(role, fleet.engine_url(role)) as engine:
            await settled(engine)
    fields: dict[str, Any] = {"model": model, "max_tokens": 120, "ignore_eos": True}
    calm = await chat(fleet.url, asked(6, 7), cache_salt=uuid.uuid4().hex, **fields)
    asking = asyncio.create_task(chat(fleet.url, asked(6, 7), TRACE, cache_salt=uuid.uuid4().hex, **fields))
    await until(fleet, lambda running: any(each["engine"] == "decode-0" and each["tokens"] > 5 for each in running))
    send_signal(processes_of(fleet.engine_url("decode")), signal.SIGKILL)
    answer = await asking
    assert tokens_of(answer) == tokens_of(calm)
    assert answer["tercet"]["events"][-1]["engine"] == "prefill-0"
