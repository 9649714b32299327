"""A model that is replaced at known addresses: once all engines have the new weights, the router serves again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tercet.fleet import membership
from tercet.fleet.membership import REPLACED_AFTER_S, ReplacedModel, ServedModel
from tercet.protocol import EngineStatus, EngineUnreachable
from tercet.protocol.addresses import TextFingerprint
from tests.longest_wait import until

from .conftest import Engine, LiveRouter
from .test_moves import running

OURS = TextFingerprint("words", "template")


async def status(**fields: object) -> EngineStatus:
    return msgspec.structs.replace(await Engine("e").status(), **fields)


async def test_it_takes_all_that_answer_and_some_time() -> None:
    new, other = await status(fingerprint="new"), await status(fingerprint="other")
    seen = ReplacedModel()
    assert seen.seen(0.0, [new], any_serves=True) is None
    assert seen.seen(1.0, [new, new], any_serves=False) is None
    assert seen.seen(1.0 + REPLACED_AFTER_S / 2, [new, other], any_serves=False) is None  # they differ: it begins again
    assert seen.seen(10.0, [new], any_serves=False) is None
    assert seen.seen(10.0 + REPLACED_AFTER_S / 2, [], any_serves=False) is None
    assert seen.seen(20.0, [new], any_serves=False) is None
    found = seen.seen(
        20.0 + REPLACED_AFTER_S, [new, await status(fingerprint="new", max_model_len=7)], any_serves=False
    )
    assert found is not None
    assert (found.fingerprint, found.max_model_len) == ("new", 7)


@pytest.fixture
async def watched(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveRouter]:
    monkeypatch.setattr(membership, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(membership, "REPORTED_WITHIN", 0.0)
    monkeypatch.setattr(membership, "REPLACED_AFTER_S", 0.1)
    await replace(router, "p", "d", weights="old")
    await router.shared.replaced(with_weights(router, "old"))
    await router.membership.speak(OURS)
    router.membership.on_replaced = router.shared.replaced
    watching = asyncio.create_task(router.membership.watch())
    yield router
    watching.cancel()


def with_weights(router: LiveRouter, weights: str) -> ServedModel:
    assert router.shared.state.served_model is not None
    return msgspec.structs.replace(router.shared.state.served_model, fingerprint=weights)


async def replace(router: LiveRouter, *names: str, weights: str, text: TextFingerprint = OURS) -> None:
    for name in names:
        router.engine(name).fingerprint, router.engine(name).text = weights, text


async def serves(router: LiveRouter) -> list[bool]:
    """After a while, whether each engine is picked."""
    for _ in range(4):
        await asyncio.sleep(0.1)
        await router.membership.ask(router.fleet.members)
    return [member.reachable for member in router.fleet.members]


@pytest.mark.slow
async def test_the_router_serves_other_weights_once_all_engines_have_them(watched: LiveRouter) -> None:
    await replace(watched, "p", weights="new")
    assert await serves(watched) == [False, True]  # the old model serves until its last engine has gone
    await replace(watched, "d", weights="new")
    await until(lambda: all(member.reachable for member in watched.fleet.members))
    assert watched.membership.served_model is not None
    assert watched.membership.served_model.fingerprint == "new"
    assert watched.shared.state.served_model == watched.membership.served_model  # so it is after a restart
    await replace(watched, "d", weights="old")
    assert await serves(watched) == [True, False]


@pytest.mark.parametrize(
    "fields", [{"text": TextFingerprint("swapped", "template")}, {"model": "x"}, {"max_model_len": 9}]
)
async def test_what_this_router_cannot_serve_stays_refused(watched: LiveRouter, fields: dict[str, object]) -> None:
    await replace(watched, "p", "d", weights="new")
    for name in ("p", "d"):
        for field, value in fields.items():
            setattr(watched.engine(name), field, value)
    assert await serves(watched) == [False, False]
    with pytest.raises(EngineUnreachable):
        watched.fleet.health.require_answers()


async def test_an_answer_does_not_go_on_with_another_model(router: LiveRouter) -> None:
    async def replaced_while_it_runs() -> None:
        async with running(router) as (_, sequence):
            assert sequence.tokens
            await router.shared.replaced(with_weights(router, "new"))

    with pytest.raises(EngineUnreachable, match="the model was replaced by another one while this request ran"):
        await replaced_while_it_runs()
    assert await router.has_everything_back()
