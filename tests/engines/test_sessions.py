"""The turns of a session stay on one engine; a drain sends its KV to another one, where the next turn finds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Fleet, router_over
from .moving import ask
from .prompts import complete, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("sessions")]

TURN = 300


async def turn(url: str, said: list[int], **headers: str) -> tuple[str, int, list[int]]:
    """The engine, the tokens that it had in its cache, and the answer's tokens."""
    headers = {"x-tercet-trace": "true", **headers}
    found = await complete(url, said, headers, max_tokens=20, ignore_eos=True)
    (generated,) = [event for event in found["tercet"]["events"] if event["verb"] == "start_generate"]
    return generated["engine"], generated.get("cached", 0), found["choices"][0]["token_ids"]


async def test_a_drained_engine_sends_its_sessions_contexts_to_another(fleet: Fleet, tmp_path: Path) -> None:
    urls = fleet.engine_urls()
    flags = ("--program", "data_parallel", "--sessions", "on", "--session-keep", "all")
    with router_over(urls, tmp_path, *flags) as url:
        own, named = Fleet(url, fleet.places), {"x-dynamo-session-id": "agent"}
        said = prompt_of(TURN, seed=901)
        home, _, first = await turn(url, said, **named)
        said += [*first, *prompt_of(40, seed=902)]
        engine, cached, second = await turn(url, said, **named)
        assert (engine, cached > TURN // 2) == (home, True)
        said += [*second, *prompt_of(40, seed=903)]
        assert (await ask(own, "POST", f"/engines/{home}/drain"))[0] == 200
        engine, cached, third = await turn(url, said, **named)
        assert engine != home
        assert cached > TURN // 2, "what was computed on the drained engine was sent"
        # A session without a name goes where it is told, and finds nothing there.
        assert (await ask(own, "DELETE", f"/engines/{home}/drain"))[0] == 200
        assert (await ask(own, "POST", f"/engines/{engine}/drain"))[0] == 200
        other, _, alone = await turn(url, said)
        assert (other, alone) == (home, third)
