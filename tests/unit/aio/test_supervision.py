"""Background tasks go on after any error, log it once, and every endless loop of the product is kept by somebody."""

from __future__ import annotations

import ast
import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import tercet
from tercet.aio import TaskSet, keep_running, repeat, tasks

SRC = Path(tercet.__file__).parent
EMFILE = OSError(errno.EMFILE, "Too many open files")

KEPT = "run again after an error, by keep_running or TaskSet.keep"
REPEATED = "each turn is caught, by repeat"
ENDS = "its end ends its process or command, which is started again by the table in docs/operations.md"
ENDLESS = {
    "aio/tasks.py:repeat": "the mechanism",
    "cluster/joining.py:_stay": KEPT,
    "cluster/on_ray/ray_fleet.py:Follower.keep": ENDS,
    "cluster/running_fleet.py:_read_events": KEPT,
    "cluster/running_fleet.py:_say_what_is_left": "it tells how a stop proceeds, and the stop does not wait for it",
    "fleet/discovery/pod_discovery.py:PodDiscovery.changes": "its reader, follow_found, is run again",
    "fleet/discovery/roster_file.py:RosterFile.changes": "its reader, follow_found, is run again",
    "fleet/discovery/watching.py:Watch.run": KEPT,
    "fleet/kv_events.py:follow_cache": KEPT,
    "fleet/kv_events.py:_follow": "follow_cache starts another one when it has ended",
    "fleet/membership.py:Membership.watch": KEPT,
    "lab/planning/live_planner.py:LivePlanner._look_on": KEPT,
    "router/fleet_adapters.py:AdapterLoader.run": KEPT,
    "router/joined_members.py:remove_gone": KEPT,
    "router/page/other_workers.py:OtherWorkers._find": KEPT,
    "router/reload.py:reload_on_change": KEPT,
    "router/rescheduler_server.py:_follow": KEPT,
    "router/role_keeper.py:RoleKeeper._decide": KEPT,
    "router/sessions.py:Sessions._watch": KEPT,
    "router/shared_state.py:SharedState.follow": KEPT,
    "transport/agent/control_channel.py:AsyncControlClient._take_answers": KEPT,
    "vllm_plugin/edge/agent_reports.py:AgentReports._receive": KEPT,
    "vllm_plugin/edge/liveness_probe.py:LivenessProbe._watch": KEPT,
    "vllm_plugin/edge/liveness_probe.py:_Part.ask_again_and_again": KEPT,
    "wire/client/prefill_attempts.py:PrefillAttempts._until_lost": "it ends with its request",
    "wire/client/stream_keeper.py:StreamKeeper._keep": KEPT,
}


def endless_loops() -> set[str]:
    """Every coroutine with a `while True` that awaits and that no return, break or raise leaves."""
    found = set[str]()
    for file in SRC.rglob("*.py"):
        place = file.relative_to(SRC).as_posix()
        if place.startswith(("lab/bench", "lab/sim", "lab/chaos", "cli/")):
            continue
        _look(ast.parse(file.read_text()), place, "", found)
    return found


def _look(node: ast.AST, place: str, name: str, found: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        here = f"{name}.{child.name}".strip(".") if isinstance(child, ast.ClassDef | ast.AsyncFunctionDef) else name
        if isinstance(child, ast.AsyncFunctionDef) and any(map(_is_endless, ast.walk(child))):
            found.add(f"{place}:{here}")
        _look(child, place, here, found)


def _is_endless(node: ast.AST) -> bool:
    if not isinstance(node, ast.While) or not (isinstance(node.test, ast.Constant) and node.test.value is True):
        return False
    inside = [each for part in node.body for each in ast.walk(part)]
    return any(isinstance(each, ast.Await | ast.AsyncFor) for each in inside) and not any(
        isinstance(each, ast.Return | ast.Break | ast.Raise) for each in inside
    )


def test_every_endless_loop_is_in_the_table() -> None:
    loops = endless_loops()
    assert loops - ENDLESS.keys() == set(), "say in ENDLESS who keeps it, and keep it"
    assert {each for each in ENDLESS if ENDLESS[each] in (KEPT, REPEATED)} - loops == set(), "it is gone"


def test_what_is_kept_is_never_a_bare_task() -> None:
    """A loop that the table calls kept is not started by `spawn(loop())` or `create_task(loop())`."""
    text = "\n".join(file.read_text() for file in SRC.rglob("*.py") if "/lab/chaos/" not in str(file))
    for each, how in ENDLESS.items():
        place, _, loop = each.partition(":")
        name = loop.rpartition(".")[2]
        own = (SRC / place).read_text()
        if how == KEPT:
            for start in ("spawn", "create_task", "ensure_future"):
                assert f"{start}(self.{name}()" not in own
                assert f"{start}({name}(" not in own
    for bare in (".watch(), ", ".follow(), ", ".follow())"):
        assert f"spawn(self.membership{bare}" not in text
        assert f"spawn(self.state{bare}" not in text
        assert f"spawn(keys{bare}" not in text


# ---- an error at each await ------------------------------------------------------------------------------------


class FailsAt:
    """An awaitable that runs a coroutine, and raises ``error`` at its ``number``-th suspension, instead of waiting."""

    def __init__(self, work: Awaitable[object], number: int, error: Exception) -> None:
        self._work, self._number, self._error = work, number, error
        self.reached = False

    def __await__(self) -> Generator[Any, Any, object]:
        steps = self._work.__await__()
        value: Any = None
        fault: BaseException | None = None
        for number in range(1_000_000):
            try:
                waited = steps.send(value) if fault is None else steps.throw(fault)
            except StopIteration as end:
                return end.value
            value = fault = None
            if number == self._number:
                self.reached, fault = True, self._error
                if waited is not None:
                    waited._asyncio_future_blocking = False
                    waited.cancel()
                continue
            try:
                value = yield waited
            except BaseException as raised:
                fault = raised
        raise AssertionError


async def with_an_error_at_each_await(
    work: Callable[[], Awaitable[object]],
    works: Callable[[], Awaitable[object]],
    awaits: int,
    before: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Keep ``work`` with an error at its first, second, ... await; ``works`` returns if it then does its task.

    ``before`` is awaited before each, to give the task something to do.
    """
    for number in range(awaits):
        for error in (EMFILE, RuntimeError("unforeseen")):
            if before is not None:
                await before()
            runs: list[FailsAt | None] = [FailsAt(work(), number, error), None]

            def one(runs: list[FailsAt | None] = runs) -> Awaitable[object]:
                first = runs.pop(0) if runs[0] is not None else None
                return work() if first is None else first

            injected = runs[0]
            assert injected is not None
            kept = TaskSet()
            task = kept.keep(one, "loop")
            try:
                async with asyncio.timeout(20):
                    while not injected.reached:
                        await asyncio.sleep(0.001)
                    await works()
                assert not task.done()
            finally:
                await kept.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.001)


async def test_a_loop_goes_on_after_an_error_at_each_of_its_awaits() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            await asyncio.wait_for(asyncio.sleep(0.001), 1)
            turns += 1

    async def works() -> None:
        before = turns
        while turns < before + 2:
            await asyncio.sleep(0.001)

    await with_an_error_at_each_await(work, works, 4)


async def test_an_error_is_logged_once_until_the_loop_works_again(caplog: pytest.LogCaptureFixture) -> None:
    failing, runs = True, 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if failing:
            raise EMFILE if runs % 3 else ValueError("another")

    async def until(more: int) -> None:
        before = runs
        while runs < before + more:
            await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(repeat(work, 0.0, "the loop"))
        await until(20)
        assert len(caplog.records) == 2, "each different error once"
        failing = False
        await until(5)
        assert "the loop works again" in caplog.text
        failing = True
        await until(20)
        task.cancel()
        await asyncio.wait({task})
    assert len(caplog.records) == 5


async def test_a_kept_task_ends_when_it_returns_or_is_cancelled() -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    await keep_running(ends, "it")
    kept = TaskSet()
    task = kept.keep(lambda: asyncio.sleep(60), "it")
    await asyncio.sleep(0)
    assert await kept.close()
    assert task.cancelled()
