"""OpenAI's batches: their files, what runs and in which order, and what is left after a kill at any moment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tercet.decisions.gaps import Gaps
from tercet.protocol import BadRequest, Conflict, EngineLoad, RequestTooLarge, UnknownPath
from tercet.protocol.headers import CHAT
from tercet.router.batches import batch_runner
from tercet.router.batches.batch_files import Batch, BatchFiles, page_of
from tercet.router.batches.batch_lines import BadLines, Lines, answered, known_results, unanswered, write_in_order
from tercet.router.batches.batch_runner import BatchRunner
from tercet.router.observe.metrics import Metrics
from tercet.wire.serving.server_access import OF_BATCH
from tests.longest_wait import LONGEST_WAIT_S, until

WINDOW = ("24h", 86400.0)
IDLE = EngineLoad(waiting=0, running=0, kv_usage=0.0)


def line_of(number: int, **changes: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"number": number}, **changes}


def text_of(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return BatchFiles(tmp_path / "batches", 1_000_000)


def begun(files: BatchFiles, requests: int, owner: str = "") -> Batch:
    record = files.add_file(owner, "in.jsonl", text_of(*map(line_of, range(requests))))
    return files.add_batch(owner, record.id, CHAT, WINDOW, None)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_client_has_its_own_files_and_batches(files: BatchFiles) -> None:
    mine = begun(files, 2, "me")
    with pytest.raises(UnknownPath):
        files.file("you", mine.asked.input_file_id)
    with pytest.raises(UnknownPath):
        files.batch("you", mine.asked.id)
    assert files.files("you") == [] == files.batches("you")
    assert [each.asked.id for each in files.batches("me")] == [mine.asked.id]
    with pytest.raises(Conflict, match="still reads"):
        files.delete_file("me", mine.asked.input_file_id)


@pytest.mark.parametrize("name", ["file-x", "../../etc/passwd", "file-" + "0" * 32 + "/..", "", "batch_"])
def test_names_of_other_files_are_unknown(files: BatchFiles, name: str) -> None:
    for ask in (files.file, files.batch):
        with pytest.raises(UnknownPath):
            ask("", name)


def test_the_storage_is_bounded_for_all_and_for_one_client(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path, 1000)
    files.add_file("a", "x", b"x" * 400)
    with pytest.raises(RequestTooLarge, match="batch-storage"):
        files.add_file("a", "x", b"x" * 200)  # half of it is the most for one client
    files.add_file("b", "x", b"x" * 500)
    with pytest.raises(RequestTooLarge):
        files.add_file("c", "x", b"x" * 200)
    first = files.files("a")[0]
    files.delete_file("a", first.id)
    assert files.used().total() == 500
    assert not files.content_path(first).exists()
    files.add_file("c", "x", b"x" * 200)


def test_old_files_go_and_those_that_are_read_stay(tmp_path: Path) -> None:
    now = [1e9]
    files = BatchFiles(tmp_path, 1_000_000, lambda: now[0])
    batch, other = begun(files, 1), files.add_file("", "x", b"x")
    now[0] += 40 * 86400
    files.sweep()
    assert files.content_path(other).exists() is False
    assert (tmp_path / "files" / batch.asked.input_file_id).exists()
    files.write_state(batch.asked.id, batch.state.now("completed", now[0]))
    files.sweep()
    assert files.batches("") == []


def test_pages_of_lists() -> None:
    assert page_of([1, 2, 3], str, None, 2) == ([1, 2], True)
    assert page_of([1, 2, 3], str, "2", 2) == ([3], False)
    with pytest.raises(BadRequest, match="after"):
        page_of([1], str, "9", 2)


def test_one_process_has_the_lock(tmp_path: Path) -> None:
    first, second = BatchFiles(tmp_path, 1), BatchFiles(tmp_path, 1)
    assert first.turn.take()
    assert not second.turn.take()
    first.turn.release()
    assert second.turn.take()
    second.turn.release()


# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (line_of(1, method="GET"), "invalid_method"), (line_of(1, url="/v1/completions"), "mismatched_url"),
        (line_of(1, custom_id=""), "invalid_custom_id"), (line_of(1, custom_id=7), "invalid_json_line"),
        (line_of(1, body={"stream": True}), "invalid_body"), (line_of(0), "duplicate_custom_id"),
        ([], "invalid_json_line"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_line(files: BatchFiles, line: Any, code: str) -> None:
    record = files.add_file("", "in.jsonl", text_of(line_of(0)) + b"\n" + text_of(line))
    asked = files.add_batch("", record.id, CHAT, WINDOW, None).asked
    with pytest.raises(BadLines) as bad:
        Lines(files.content_path(record), asked, files.results_path(asked.id))
    assert [(each.code, each.line) for each in bad.value.faults] == [(code, 3)]


@pytest.mark.parametrize("value", [b"[" * 5000 + b"]" * 5000, b'"\xff"'])
def test_a_line_that_cannot_be_read_is_a_fault_too(files: BatchFiles, value: bytes) -> None:
    record = files.add_file("", "in.jsonl", text_of(line_of(0)).replace(b'{"number": 0}', b'{"number": %b}' % value))
    asked = files.add_batch("", record.id, CHAT, WINDOW, None).asked
    with pytest.raises(BadLines) as bad:
        Lines(files.content_path(record), asked, files.results_path(asked.id))
    assert [each.code for each in bad.value.faults] == ["invalid_json_line"]


def test_a_file_may_begin_with_a_byte_order_mark(files: BatchFiles) -> None:
    record = files.add_file("", "in.jsonl", b"\xef\xbb\xbf" + text_of(line_of(0), line_of(1)))
    asked = files.add_batch("", record.id, CHAT, WINDOW, None).asked
    lines = Lines(files.content_path(record), asked, files.results_path(asked.id))
    assert [lines.read(index).custom_id for index in lines.left] == ["r0", "r1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.permutations(range(6)), st.integers(0, 6), st.integers(0, 400), st.lists(st.booleans(), min_size=6, max_size=6)
)
def test_after_a_kill_in_the_middle_of_a_write_each_line_runs_once_and_results_are_in_order(
    files: BatchFiles, order: list[int], ended: int, cut: int, good: list[bool]
) -> None:
    batch = begun(files, 6)
    path = files.content_path(files.file("", batch.asked.input_file_id))
    results = files.results_path(batch.asked.id)
    lines = Lines(path, batch.asked, results)

    def record(index: int) -> bytes:
        line = lines.read(index)
        body = json.dumps({"n": line.body["number"]}).encode()
        return answered(index, line, 200, "q", body) if good[index] else unanswered(index, line, "c", "m")

    written = b"".join(record(index) for index in order[:ended])
    results.write_bytes(written[: max(0, len(written) - cut)])
    again = Lines(path, batch.asked, results)
    known = [each.index for each in known_results(results)]
    assert known == order[: len(known)]
    assert sorted([*known, *again.left]) == list(range(6))
    assert again.counts.completed + again.counts.failed == len(known)
    with results.open("ab") as file:
        file.writelines(record(index) for index in again.left)
    output, errors = results.with_name("o"), results.with_name("e")
    assert write_in_order(results, output, errors) == (sum(good), 6 - sum(good))
    for path_of, wanted in ((output, True), (errors, False)):
        names = [json.loads(each)["custom_id"] for each in path_of.read_text().splitlines()]
        assert names == [f"r{index}" for index in range(6) if good[index] is wanted]


@pytest.mark.parametrize(
    "spoilt", [b"\0" * 99, b'[0,true,{"id":"\xff', b"{}", b'[0,true,{"id":1}'], ids=["zeros", "cut", "other", "open"]
)
def test_a_result_that_a_power_cut_has_spoilt_is_made_again(files: BatchFiles, spoilt: bytes) -> None:
    batch = begun(files, 2)
    path, results = files.content_path(files.files("")[0]), files.results_path(batch.asked.id)
    good = answered(1, Lines(path, batch.asked, results).read(1), 200, "q", b"{}")
    results.write_bytes(spoilt + b"\n" + good)
    again = Lines(path, batch.asked, results)
    assert ([*again.left], again.counts.completed) == ([0], 1)
    assert write_in_order(results, results.with_name("o"), results.with_name("e")) == (1, 0)


def test_an_answer_that_is_no_json_is_kept_as_text(files: BatchFiles) -> None:
    batch = begun(files, 1)
    lines = Lines(files.content_path(files.files("")[0]), batch.asked, files.results_path(batch.asked.id))
    found = json.loads(answered(0, lines.read(0), 500, "q", b"\xff oops"))
    assert found[1] is False
    assert found[2]["response"]["body"] == "\ufffd oops"
    deep = b"[" * 5000 + b"]" * 5000
    assert json.loads(answered(0, lines.read(0), 200, "q", deep))[2]["response"]["body"] == deep.decode()


# ---- running ---------------------------------------------------------------------------------------------------------


class World:
    """A runner over an application, a gate and a fleet of this test."""

    def __init__(self, files: BatchFiles, monkeypatch: pytest.MonkeyPatch, per_engine: int = 8) -> None:
        for name in ("LOOK_S", "FOLLOW_S", "AGAIN_S"):
            monkeypatch.setattr(batch_runner, name, 0.005)
        self.files, self.per_engine = files, per_engine
        self.served: list[tuple[str, int]] = []
        self.running = self.most = 0
        self.load: EngineLoad | None = IDLE
        self.clients_wait = self.ends = False
        self.answer: Callable[[int], Awaitable[int]] = self._at_once
        self.metrics = Metrics(CollectorRegistry())

    async def _at_once(self, _: int) -> int:
        await asyncio.sleep(0)
        return 200

    # What a runner reads of a fleet, whose one engine is ``self``.
    name = "e"
    knowledge = property(lambda self: self)
    loads = property(lambda self: self)
    open = property(lambda self: [self])

    def can(self, _: str) -> bool:
        return True

    def last(self, _: str) -> tuple[EngineLoad, float] | None:
        return None if self.load is None else (self.load, 0.0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        number = json.loads(message["body"])["number"]
        self.running += 1
        self.most = max(self.most, self.running)
        leaving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(self.answer(number))
        try:
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return
            status = answering.result()
            await send({"type": "http.response.start", "status": status, "headers": []})
            # Before the end: a runner that is ended then has the answer.
            self.served.append((scope[OF_BATCH], number))
            await send({"type": "http.response.body", "body": json.dumps({"number": number}).encode()})
        finally:
            self.running -= 1
            leaving.cancel()
            answering.cancel()

    @asynccontextmanager
    async def runs(self) -> AsyncGenerator[None]:
        me: Any = self
        runner = BatchRunner(self.files, me, me, me, self.metrics, Gaps(self.per_engine), lambda: self.ends)
        running = asyncio.ensure_future(runner.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait({running})
            assert self.running == 0
            assert self.metrics.batch_running._value.get() == 0  # pyright: ignore[reportPrivateUsage]

    def state(self, batch: Batch) -> Any:
        return self.files.batch(batch.asked.owner, batch.asked.id).state

    def results(self, batch: Batch, which: str = "output") -> list[str]:
        file_id = getattr(self.state(batch), f"{which}_file_id")
        if file_id is None:
            return []
        path = self.files.content_path(self.files.file(batch.asked.owner, file_id))
        return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


@pytest.fixture
def world(files: BatchFiles, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(files, monkeypatch)


async def test_a_batch_runs_to_its_end(world: World) -> None:
    async def answer(_: int) -> int:
        await asyncio.sleep(0.02)
        return 200

    world.answer = answer
    batch = begun(world.files, 30)
    async with world.runs():
        await until(lambda: world.state(batch).status == "completed")
    assert world.results(batch) == [f"r{number}" for number in range(30)]
    assert msgspec.to_builtins(world.state(batch).counts) == {"total": 30, "completed": 30, "failed": 0}
    assert not world.files.results_path(batch.asked.id).exists()
    assert 1 < world.most <= world.per_engine


async def test_clients_take_turns(world: World) -> None:
    both = asyncio.Event()

    async def answer(_: int) -> int:
        await both.wait()
        await asyncio.sleep(0.01)
        return 200

    world.answer, world.per_engine = answer, 1
    long, short = begun(world.files, 20, "a"), begun(world.files, 3, "b")
    async with world.runs():
        await until(lambda: world.state(long).status == world.state(short).status == "in_progress")
        both.set()
        await until(lambda: world.state(short).status == "completed")
        assert sum(owner == "a" for owner, _ in world.served) <= 20 - 3
        await until(lambda: world.state(long).status == "completed")


async def test_a_failed_request_is_in_the_error_file_and_a_refused_one_runs_again(world: World) -> None:
    refused = {1: 2, 2: 1}

    async def answer(number: int) -> int:
        if refused.get(number, 0):
            refused[number] -= 1
            return 429 if number == 1 else 503
        return 400 if number == 0 else 200

    world.answer = answer
    batch = begun(world.files, 4)
    async with world.runs():
        await until(lambda: world.state(batch).status == "completed")
    assert (world.results(batch), world.results(batch, "error")) == (["r1", "r2", "r3"], ["r0"])
    assert refused == {1: 0, 2: 0}


async def test_a_runner_that_ends_puts_back_and_the_next_one_runs_the_rest(world: World) -> None:
    gate = asyncio.Event()

    async def answer(number: int) -> int:
        if number >= 10:
            await gate.wait()
        return 200

    world.answer = answer
    batch = begun(world.files, 20)
    async with world.runs():
        await until(lambda: len(world.served) == 10 and world.running > 0)
    gate.set()
    async with world.runs():
        await until(lambda: world.state(batch).status == "completed")
    assert sorted(number for _, number in world.served) == list(range(20))
    assert world.results(batch) == [f"r{number}" for number in range(20)]


async def test_a_runner_that_is_cancelled_while_it_takes_its_turn_gives_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, goes_on, taken, take = threading.Event(), threading.Event(), threading.Event(), world.files.turn.take

    def slowly() -> bool:
        begun.set()
        assert goes_on.wait(LONGEST_WAIT_S)
        assert take()
        taken.set()
        return True

    monkeypatch.setattr(world.files.turn, "take", slowly)
    async with world.runs():
        await until(begun.is_set)
    goes_on.set()
    await until(taken.is_set)
    other = BatchFiles(tmp_path / "batches", 1_000_000).turn
    await until(other.take)
    other.release()


async def test_clients_that_wait_end_requests_of_batches(world: World) -> None:
    never = asyncio.Event()

    async def answer(number: int) -> int:
        await never.wait()
        return 200

    world.answer = answer
    batch = begun(world.files, 20)
    async with world.runs():
        await until(lambda: world.running == world.per_engine)
        world.clients_wait = True
        await until(lambda: world.running == 0)
        world.clients_wait = False
        never.set()
        await until(lambda: world.state(batch).status == "completed")
    assert world.results(batch) == [f"r{number}" for number in range(20)]


async def test_a_cancelled_batch_keeps_its_results(world: World) -> None:
    never = asyncio.Event()

    async def answer(number: int) -> int:
        if number >= 5:
            await never.wait()
        return 200

    world.answer = answer
    batch = begun(world.files, 20)
    async with world.runs():
        await until(lambda: len(world.served) == 5)
        shown = world.files.cancel("", batch.asked.id).shown()
        assert shown["status"] == "cancelling"
        await until(lambda: world.state(batch).status == "cancelled")
    assert world.results(batch) == [f"r{number}" for number in range(5)]
    with pytest.raises(Conflict, match="cancelled"):
        world.files.cancel("", batch.asked.id)


async def test_requests_that_did_not_run_in_time_are_in_the_error_file(world: World, tmp_path: Path) -> None:
    never, now = asyncio.Event(), [1e9]

    async def answer(number: int) -> int:
        if number >= 5:
            await never.wait()
        return 200

    world.answer = answer
    world.files.clock = lambda: now[0]
    batch = begun(world.files, 8)
    async with world.runs():
        await until(lambda: len(world.served) == 5)
        now[0] += 86401
        await until(lambda: world.state(batch).status == "expired")
    assert (world.results(batch), world.results(batch, "error")) == (
        [f"r{number}" for number in range(5)],
        ["r5", "r6", "r7"],
    )


async def test_a_file_with_faults_fails_its_batch(world: World) -> None:
    record = world.files.add_file("", "in.jsonl", b"{}\n")
    batch = world.files.add_batch("", record.id, CHAT, WINDOW, None)
    async with world.runs():
        await until(lambda: world.state(batch).status == "failed")
    shown = world.files.batch("", batch.asked.id).shown()
    assert shown["errors"]["data"][0]["line"] == 1
    assert shown["failed_at"] is not None


async def test_a_full_disk_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = begun(world.files, 3)
    full = Path("/dev/full")
    results = world.files.results_path(batch.asked.id)
    real = Path.open

    def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        return real(full if path == results and mode == "ab" and broken else path, mode, *more, **named)

    broken = True
    monkeypatch.setattr(Path, "open", opened)
    async with world.runs():
        await until(lambda: len(world.served) > 3)
        assert world.state(batch).status == "in_progress"
    broken = False
    async with world.runs():
        await until(lambda: world.state(batch).status == "completed")
    assert world.results(batch) == ["r0", "r1", "r2"]


async def test_a_full_storage_lets_no_request_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = BatchFiles(tmp_path / "small", 4000)
    world = World(small, monkeypatch)
    batch = begun(small, 5)
    other = small.add_file("", "x", b"x" * (4000 - small.used().total()))
    async with world.runs():
        await until(lambda: world.state(batch).status == "in_progress")
        await asyncio.sleep(0.1)
        begun_before = len(world.served)
        await asyncio.sleep(0.1)
        assert len(world.served) == begun_before < 5 or small.results_size(batch.asked.id) == 0
        small.delete_file("", other.id)
        await until(lambda: world.state(batch).status == "completed")


async def test_without_an_engine_nothing_begins_and_a_router_that_ends_begins_nothing(world: World) -> None:
    world.load = None
    batch = begun(world.files, 3)
    async with world.runs():
        await until(lambda: world.state(batch).status == "in_progress")
        assert world.served == []
        world.ends = True
        world.load = IDLE
    assert world.served == []
