"""What a server that is to be measured says of itself: whatever it is, it ends in a refusal or in a file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from tercet.protocol import BadRequest, EngineUnreachable
from tercet_bench.experiment import between, prefix_counts, words
from tercet_bench.traffic import ask_target, require_programs
from tests.servers import served

MODELS = b'{"data": [{"id": "m", "max_model_len": 10}]}'
ODD = {
    "nested": b"[" * 5000 + b"]" * 5000,
    "nested, but not too deeply to be read": b"[" * 200 + b"]" * 200,
    "bytes": b'{"version": "\xff"}',
    "half a character": b'{"version": "\\ud83d"}',
    "no number": b'{"version": NaN}',
    "a list": b"[1, 2]",
    "nothing": b"",
}


@asynccontextmanager
async def serving(answers: Mapping[str, bytes], status: int = 200) -> AsyncGenerator[str]:
    """Answers each path with these bytes, others with 404."""

    async def answer(http: web.Request) -> web.Response:
        found = answers.get(http.path)
        return web.Response(status=404) if found is None else web.Response(body=found, status=status)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    async with served(app) as url:
        yield url


@pytest.mark.parametrize("path", ["/version", "/tercet/v1/engines", "/tercet/v1/program"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_what_it_tells_besides_can_be_written(path: str, odd: bytes) -> None:
    async with serving({"/v1/models": MODELS, path: odd}) as url:
        found = await ask_target(url, None, {})
    assert found.model == "m"
    assert msgspec.json.decode(msgspec.json.encode(found.about))["max_model_len"] == 10


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_models_that_cannot_be_read_are_no_answer(odd: bytes) -> None:
    async with serving({"/v1/models": odd}) as url:
        with pytest.raises(EngineUnreachable, match="does not answer as an OpenAI server"):
            await ask_target(url, None, {})


@pytest.mark.parametrize("odd", [*ODD.values(), b'{"error": "no"}', b'{"error": {"message": 7}}'])
async def test_a_refusal_that_cannot_be_read_is_no_answer(odd: bytes) -> None:
    async with serving({"/v1/models": odd}, status=400) as url:
        with pytest.raises(EngineUnreachable, match="cannot check program"):
            await require_programs(url, ["a"], {})
    async with serving({"/v1/models": b'{"error": {"message": "x-tercet-program: no"}}'}, status=400) as url:
        with pytest.raises(BadRequest, match="--program: no"):
            await require_programs(url, ["a"], {})


@pytest.mark.parametrize(
    ("engines", "found"),
    [([{"url": "x"}, {"vllm": ""}, 3], None), ([{"vllm": "b"}, {"vllm": "a"}, {"vllm": "b"}], ["a", "b"])],
)
async def test_versions_of_engines_are_those_that_the_router_lists(
    engines: list[object], found: list[str] | None
) -> None:
    async with serving({"/v1/models": MODELS, "/tercet/v1/engines": msgspec.json.encode(engines)}) as url:
        assert (await ask_target(url, None, {})).about.get("engine_versions") == found


# Prefix tokens predicted and found during a run, as the target's counters say.

TEXT = """# TYPE tercet_prefix_predicted_tokens counter
tercet_prefix_predicted_tokens_total{program="a",engine="e0"} 100.0
tercet_prefix_predicted_tokens_total{program="a",engine="e1"} 28.0
# TYPE tercet_prefix_delivered_tokens counter
tercet_prefix_delivered_tokens_total{program="a",engine="e0"} 64.0
# TYPE tercet_prefix_missing_tokens counter
tercet_prefix_missing_tokens_total{program="a",engine="e0"} 64.0
tercet_prefix_other_tokens_total 9.0
"""


async def counts_of(text: str, status: int = 200) -> dict[str, int]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with served(app) as url:
        return await prefix_counts(f"{url}/")


async def test_counters_are_summed_over_engines() -> None:
    assert await counts_of(TEXT) == {"predicted": 128, "delivered": 64, "missing": 64}


@pytest.mark.parametrize(("text", "status"), [(TEXT, 404), ("", 200), ("{{ no metrics", 200)])
async def test_another_server_has_none(text: str, status: int) -> None:
    assert await counts_of(text, status) == {}


async def test_a_server_that_does_not_answer_has_none() -> None:
    assert await prefix_counts("http://127.0.0.1:1") == {}


def test_a_run_has_what_was_counted_during_it() -> None:
    after = {"predicted": 128, "delivered": 64, "missing": 64}
    assert between({}, after) == after
    assert between({"predicted": 100, "delivered": 64, "missing": 64}, after) == {
        "predicted": 28, "delivered": 0, "missing": 0,
    }  # fmt: skip
    assert between(after, after) == {}
    assert between({"predicted": 200}, after) == {}, "the router was restarted"


def test_a_report_says_the_share_that_was_missing() -> None:
    said = words({"predicted": 200, "delivered": 150, "missing": 50})
    assert said == (
        "picks predicted 200 prefix tokens in caches, engines found 150, 50 of the predicted (25%) were missing"
    )
    assert "missing" not in words({"predicted": 0, "delivered": 5, "missing": 0})
