"""`fetch` on real engines: a pull computes nothing where the KV is, and the tokens are those of one engine alone."""

from __future__ import annotations

import uuid

import pytest

from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.programs import load_program, outputs_of
from tercet.protocol import Request, Usage
from tercet.wire.client import HttpEngine

from .prompts import BLOCK, alone, computed_prompt_tokens, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("pulls of cached KV")]


@pytest.mark.parametrize("held", [3 * BLOCK, 0], ids=["held", "stale belief"])
async def test_the_less_busy_engine_pulls_what_the_other_one_has(
    prefill: HttpEngine, decode: HttpEngine, held: int
) -> None:
    prompt = prompt_of(3 * BLOCK + 40, seed=5 + held)
    sampling = {"temperature": 0, "max_tokens": 8}
    request = Request(
        seq_id=uuid.uuid4().hex, prompt=tuple(prompt), cache_salt=uuid.uuid4().hex, sampling_params=sampling
    )  # fmt: skip
    if held:
        seed = Request(seq_id=uuid.uuid4().hex, prompt=request.prompt[:-30], cache_salt=request.cache_salt)
        async for _ in prefill.start_generate(seed):
            break
    members = [Member(each.name, each.url, "both", each) for each in (prefill, decode)]
    fleet, trace, usages, tokens = EngineFleet(members), Trace(), list[Usage | None](), list[int]()
    members[0].in_flight = 1
    fleet.picking.note_routed(request, [prefill.name])
    before = await computed_prompt_tokens(prefill.url)
    async for output in outputs_of(load_program("fetch")(request, FleetView(fleet, trace))):
        usages.append(output.usage)
        tokens += output.token_ids
    assert await computed_prompt_tokens(prefill.url) == before
    assert tokens == await alone(decode.url, prompt, max_tokens=8)
    assert [(event.verb, event.engine) for event in trace.events] == [
        ("prep_recv", decode.name), ("remote_send", prefill.name), ("start_generate", decode.name),
    ]  # fmt: skip
    sent = trace.events[1]
    assert (sent.end, sent.cached, sent.computed) == (held, held, 0)
    assert usages[0] == Usage(received=held, computed=len(prompt) - held)
