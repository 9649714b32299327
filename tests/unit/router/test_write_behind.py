"""Write-behind: prompts are copied to stores after their first token, few at a time, and no request notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tercet.aio.tasks import TaskSet
from tercet.fleet import EngineFleet, FleetView, Member, Trace
from tercet.protocol import EngineUnreachable, Request, Revision
from tercet.router.observe.metrics import CopyOutcome, WriteBehindMetrics
from tercet.router.serve import context_copies
from tercet.router.serve.context_copies import WriteBehind
from tests.longest_wait import until
from tests.unit.fakes import BLOCK, LAYOUT, FakeEngine
from tests.unit.supervision import Works, with_an_error_at_each_await


class Counted(WriteBehindMetrics):
    """Counts that belong to one test."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0

    def ended(self, outcome: CopyOutcome, tokens: int = 0) -> None:
        self.outcomes[outcome] += 1
        self.tokens += tokens


class Copies:
    """A fleet of an engine and a store, whose prompts are copied."""

    def __init__(self) -> None:
        self.engine, self.store, self.metrics = FakeEngine("a", 3 * BLOCK), FakeEngine("s"), Counted()
        revision = Revision("1.0", "0.32", "weights", layout=LAYOUT)
        self.members = [Member("a", "", "both", self.engine, revision=revision),
                        Member("s", "", "store", self.store, revision=revision)]  # fmt: skip
        self.fleet = EngineFleet(self.members)
        self.copies = WriteBehind(self.fleet, self.metrics)
        self._number = 0

    async def serve(self, tokens: int = 3 * BLOCK) -> list[int]:
        self._number += 1
        request = Request(seq_id=f"r{self._number}", prompt=tuple(range(tokens)))
        with FleetView(self.fleet).pick("both", request=request) as engine:
            return [token async for output in engine.start_generate(request) for token in output.token_ids]


@pytest.fixture
async def copied() -> AsyncGenerator[Copies]:
    made, tasks = Copies(), TaskSet()
    tasks.keep(made.copies.run, "copies")
    yield made
    await tasks.close()


def sends(engine: FakeEngine) -> int:
    return sum(call[0] == "remote_send" for call in engine.calls)


async def test_a_prompt_is_copied_after_its_first_token(copied: Copies) -> None:
    tokens = await copied.serve()
    assert len(tokens) == 3
    await until(lambda: copied.metrics.outcomes)
    assert copied.metrics.outcomes == {"copied": 1}
    assert copied.metrics.tokens == 3 * BLOCK
    assert [call[0] for call in copied.store.calls] == ["prep_recv"]
    assert not copied.store.leases


async def test_a_prompt_whose_first_token_came_from_another_engine_is_copied_once(copied: Copies) -> None:
    """The decode engine of a pair continues after the first token; so does the destination of a move."""
    request = Request(seq_id="pair", prompt=tuple(range(3 * BLOCK)))
    view = FleetView(copied.fleet, Trace(), request=request)
    for output in ((7,), (7, 8)):
        with view.pick("both", request=request) as engine:
            assert [token async for each in engine.start_generate(request, 0, output) for token in each.token_ids]
    await until(lambda: copied.metrics.outcomes)
    await copied.serve()
    await until(lambda: copied.metrics.outcomes["copied"] > 1)
    assert [call[0] for call in copied.store.calls] == ["prep_recv", "prep_recv"]


async def test_what_the_store_holds_is_not_sent(copied: Copies) -> None:
    copied.store.matched = 3 * BLOCK
    await copied.serve(3 * BLOCK + 5)
    await until(lambda: copied.metrics.outcomes)
    assert (copied.metrics.outcomes, sends(copied.engine)) == ({"held": 1}, 0)


async def test_short_prompts_draining_engines_and_other_weights_are_left_alone(copied: Copies) -> None:
    await copied.serve(BLOCK - 1)
    copied.members[0].stopping = True
    await copied.serve()
    copied.members[0].stopping = False
    copied.members[1].revision = Revision("1.0", "0.32", "other", layout=LAYOUT)
    await copied.serve()
    copied.members[1].revision = copied.members[0].revision
    copied.members[1].reachable = False
    await copied.serve()
    copied.members[1].reachable = True
    await copied.serve()
    await until(lambda: copied.metrics.outcomes)
    assert copied.metrics.outcomes == {"copied": 1}


async def test_a_store_that_says_nothing_costs_copies_and_no_request(
    copied: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_copies, "MOST_WAITING", 2)
    copied.store.pause.clear()
    for _ in range(6):
        assert len(await copied.serve()) == 3
    assert copied.metrics.outcomes == {"dropped": 3}  # one is being copied, two wait
    copied.store.pause.set()
    await until(lambda: copied.metrics.outcomes["copied"] == 3)
    assert not copied.store.leases


async def test_a_copy_has_a_deadline_and_a_failure_is_counted(copied: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_copies, "COPY_SECONDS", 0.01)
    copied.store.pause.clear()
    await copied.serve()
    await until(lambda: copied.metrics.outcomes["failed"] == 1)
    copied.store.pause.set()
    copied.store.failures["prep_recv"] = EngineUnreachable("gone")
    await copied.serve()
    await until(lambda: copied.metrics.outcomes["failed"] == 2)
    del copied.store.failures["prep_recv"]
    await copied.serve()
    await until(lambda: copied.metrics.outcomes["copied"] == 1)


async def test_copies_go_on_after_an_error() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        made, tasks = Copies(), TaskSet()
        tasks.keep(made.copies.run, "copies")

        async def works() -> None:
            before = made.metrics.outcomes["copied"]
            while made.metrics.outcomes["copied"] == before:
                done = made.metrics.outcomes.total()
                await made.serve()
                await until(lambda done=done: made.metrics.outcomes.total() > done)

        try:
            yield works
        finally:
            await tasks.close()

    await with_an_error_at_each_await("router/serve/context_copies.py:WriteBehind.run", started)
