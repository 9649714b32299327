"""Background tasks go on after any error, log it once, and every endless loop of the product is kept by somebody."""

from __future__ import annotations

import ast
import asyncio
import errno
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tercet.aio import tasks
from tercet.aio.tasks import TaskSet, keep_running, repeat
from tests.sources import modules

EMFILE = OSError(errno.EMFILE, "Too many open files")

KEPT = "run again after an error, by keep_running or TaskSet.keep"
REPEATED = "each turn is caught, by repeat"
ENDS = "its end ends its process or command, which is started again by the table in docs/operations.md"
ENDLESS = {
    "aio/tasks.py:repeat": "the mechanism",
    "tercet_ray/ray_fleet.py:Follower.keep": ENDS,
    "cluster/running_fleet.py:_EventLog.follow": KEPT,
    "cluster/running_fleet.py:_say_what_is_left": "it tells how a stop proceeds, and the stop does not wait for it",
    "fleet/discovery.py:PodDiscovery.changes": "its reader, follow_found, is run again",
    "fleet/discovery.py:RosterFile.changes": "its reader, follow_found, is run again",
    "fleet/kubernetes_api.py:Watch.run": KEPT,
    "fleet/kv_events.py:follow_cache": KEPT,
    "fleet/kv_events.py:_follow": KEPT,
    "fleet/membership.py:Membership.watch": KEPT,
    "tercet_planner/live_planner.py:LivePlanner._look_on": KEPT,
    "router/state/fleet_adapters.py:AdapterLoader.run": KEPT,
    "router/state/joined_members.py:remove_gone": KEPT,
    "router/page/watch.py:OtherWorkers._find": KEPT,
    "router/state/loaded_code.py:reload_on_change": KEPT,
    "router/state/roles.py:RoleKeeper._decide": KEPT,
    "router/serve/sessions.py:Sessions._watch": KEPT,
    "router/serve/context_copies.py:WriteBehind.run": KEPT,
    "router/workers.py:Shared._beat": "a worker that does not report is killed and replaced by its supervisor",
    "router/state/shared_state.py:SharedState.follow": KEPT,
    "store/announcer.py:Announcer._repeat": KEPT,
    "store/blocks.py:StoreBlocks._write_behind": KEPT,
    "transport/agent/agent_messages.py:AsyncControlClient._take_answers": KEPT,
    "engine/agents.py:AgentReports._receive": KEPT,
    "engine/liveness_probe.py:LivenessProbe._watch": KEPT,
    "engine/liveness_probe.py:_Part.ask_again_and_again": KEPT,
    "wire/client/bounded_answers.py:RouterMembership.stay": KEPT,
    "wire/client/remote_prefill.py:PrefillAttempts._until_lost": "it ends with its request",
    "wire/client/stream_listener.py:StreamKeeper._keep": KEPT,
}


def endless_loops() -> set[str]:
    """Every coroutine with a `while True` that awaits and that no return, break or raise leaves."""
    found = set[str]()
    for place, file in modules():
        laboratory = place.startswith(("tercet_bench/", "tercet_lab/bench", "tercet_lab/sim", "tercet_checks/chaos"))
        command = (place.startswith("cli/") and place != "cli/engine_process.py") or "/commands/" in place
        if laboratory or command:
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
    files = dict(modules())
    text = "\n".join(file.read_text() for name, file in files.items() if not name.startswith("tercet_checks/chaos/"))
    for each, how in ENDLESS.items():
        place, _, loop = each.partition(":")
        name = loop.rpartition(".")[2]
        own = files[place].read_text()
        if how == KEPT:
            for start in ("spawn", "create_task", "ensure_future"):
                assert f"{start}(self.{name}()" not in own
                assert f"{start}({name}(" not in own
    for bare in (".watch(), ", ".follow(), ", ".follow())"):
        assert f"spawn(self.membership{bare}" not in text
        assert f"spawn(self.state{bare}" not in text
        assert f"spawn(keys{bare}" not in text


def test_every_kept_loop_gets_an_error_at_each_of_its_awaits() -> None:
    tried = list[str]()
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        if "with_an_error_at_each_await" not in file.read_text():
            continue
        tests = [each for each in ast.parse(file.read_text()).body if isinstance(each, ast.AsyncFunctionDef)]
        for each in (each for test in tests if test.name.startswith("test_") for each in ast.walk(test)):
            if isinstance(each, ast.Call) and ast.unparse(each.func) == "with_an_error_at_each_await":
                assert isinstance(each.args[0], ast.Constant)
                tried.append(str(each.args[0].value))
    kept = [each for each, how in ENDLESS.items() if how == KEPT]
    assert sorted(tried) == sorted(kept), "each loop of the table that is kept has one test of its own"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.001)


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


@pytest.mark.parametrize("keeping", [keep_running, partial(repeat, pause_s=0.0)])
async def test_a_task_whose_clean_up_fails_ends_when_it_is_cancelled(keeping: Callable[..., Any]) -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise EMFILE

    task = asyncio.create_task(keeping(work, name="it"))
    await began.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    assert task.cancelled()


async def test_a_kept_task_ends_when_it_returns_or_is_cancelled() -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    await keep_running(ends, "it")
    kept = TaskSet()
    task = kept.keep(lambda: asyncio.sleep(60), "it")
    await asyncio.sleep(0)
    assert await kept.close()
    assert task.cancelled()
