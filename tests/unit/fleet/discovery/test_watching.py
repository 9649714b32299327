"""A mirror stays equal to what the API server has, over real HTTP, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.fleet.kubernetes_api import ApiAccess, Pod, Waits, Watch
from tests.longest_wait import LONGEST_WAIT_S, until

from .api_server import FAST, PODS, ApiServer, api_server, pod


class Seen:
    """What a watch has told of last."""

    def __init__(self) -> None:
        self.pods: dict[str, tuple[str, str]] | None = None
        self.times = 0
        self._changed = asyncio.Event()

    def __call__(self, pods: list[Pod]) -> None:
        self.pods = {each.metadata.name: (each.metadata.uid, each.status.pod_ip) for each in pods}
        self.times += 1
        self._changed.set()

    async def until(self, wanted: Callable[[dict[str, tuple[str, str]]], bool]) -> None:
        async with asyncio.timeout(LONGEST_WAIT_S):
            while self.pods is None or not wanted(self.pods):
                self._changed.clear()
                await self._changed.wait()

    async def until_like(self, server: ApiServer) -> None:
        has = {name: (each["metadata"]["uid"], each["status"]["podIP"]) for name, each in server.pods.items()}
        await self.until(lambda pods: pods == has)


@asynccontextmanager
async def watching(server: ApiServer, waits: Waits = FAST, api: ApiAccess | None = None) -> AsyncGenerator[Seen]:
    seen = Seen()
    watch = Watch(api or server.api, PODS, Pod, {"labelSelector": "app=engine"}, seen, waits)  # type: ignore[arg-type]
    following = asyncio.create_task(watch.run())
    try:
        yield seen
    finally:
        following.cancel()
        await asyncio.wait({following})
        assert following.cancelled()


@pytest.fixture
async def server() -> AsyncGenerator[ApiServer]:
    async with api_server() as made:
        yield made


async def watched(server: ApiServer, times: int = 1) -> None:
    await until(lambda: server.watches >= times and len(server._open))


async def test_lists_in_pages_then_hears_of_changes(server: ApiServer) -> None:
    for number in range(5):
        server.put(pod(f"p{number}"))
    server.put({"metadata": {"name": "other", "labels": {"app": "web"}}})
    server.page = 2
    async with watching(server) as seen:
        await seen.until(lambda pods: len(pods) == 5)
        assert seen.times == 1, "pages are one list"
        await watched(server)
        server.put(pod("p9"))
        server.delete("p0")
        await seen.until(lambda pods: "p9" in pods and "p0" not in pods)
        assert server.lists == 3, "a change is no reason to list"
        watch = server.queries[-1]
        assert (watch["watch"], watch["allowWatchBookmarks"], watch["resourceVersion"]) == ("1", "true", "106")


async def test_goes_on_where_a_watch_ended_without_a_list(server: ApiServer) -> None:
    server.put(pod("a"))
    async with watching(server, replace(FAST, watch_s=1.0)) as seen:
        for times in range(1, 4):
            await watched(server, times)
            server.put(pod(f"p{times}"))
            await seen.until(lambda pods, times=times: f"p{times}" in pods)
            server.drop()
        await watched(server, 4)
        assert server.lists == 1
        assert server.queries[-1]["resourceVersion"] == str(server.version)


async def test_a_bookmark_moves_on_where_it_resumes(server: ApiServer) -> None:
    server.put(pod("a"))
    async with watching(server) as seen:
        await watched(server)
        times = seen.times
        server.bookmark()
        await asyncio.sleep(0.02)
        server.compact()
        server.drop()
        await watched(server, 2)
        assert server.lists == 1, "it went on from the bookmark, which is not compacted"
        assert seen.times == times, "a bookmark changes nothing"


async def test_a_line_that_breaks_off_in_its_middle_is_heard_whole_later(server: ApiServer) -> None:
    async with watching(server) as seen:
        await watched(server)
        line = json.dumps({"type": "ADDED", "object": pod("half")}).encode()
        server.drop(begun=line[: len(line) // 2])
        server.put(pod("b"))
        await seen.until(lambda pods: "b" in pods)
        assert set(seen.pods or ()) == {"b"}
        assert server.lists == 1


async def test_410_lists_again_and_forgets_who_is_gone(server: ApiServer) -> None:
    server.put(pod("a"))
    server.put(pod("b"))
    async with watching(server) as seen:
        for times in (1, 2):  # as a status, and as an event
            await watched(server)
            server.drop()
            server.put(pod("c", f"10.0.1.{times}"))
            server.delete("a")
            server.compact()
            await seen.until_like(server)
            assert server.lists == times + 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"etcd"}}',
        b'{"type":"NEW","object":{}}',
        b'{"type":"ADDED","object":{"metadata":[]}}',
        b'{"type":"ADDED","object":',
        b"<html>",
        b"[" * 5000,
    ],
)
async def test_what_is_no_event_lists_again(server: ApiServer, line: bytes) -> None:
    server.put(pod("a"))
    async with watching(server) as seen:
        await watched(server)
        server.say(line)
        await watched(server, 2)
        server.put(pod("b"))
        await seen.until_like(server)
        assert server.lists == 2


async def test_a_line_without_an_end_is_not_kept_forever(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.fleet.kubernetes_api.LONGEST_LINE", 1000)
    async with watching(server) as seen:
        await watched(server)
        server.say(b"x" * 5000)
        await watched(server, 2)
        assert server.lists == 2
        assert seen.pods == {}


async def test_silence_is_a_failure_and_is_bounded(server: ApiServer) -> None:
    server.put(pod("a"))
    server.silent = True
    async with watching(server, replace(FAST, watch_s=0.2, grace_s=0.1)) as seen:
        await watched(server)
        server.put(pod("b"))
        server.silent = False
        await seen.until_like(server)
        assert (server.watches >= 2, server.lists) == (True, 1)


async def test_while_the_server_is_away_what_is_known_stays(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("a"))
    async with watching(server) as seen:
        await watched(server)
        times = seen.times
        with caplog.at_level(logging.WARNING):
            server.refuse = (503, {"Retry-After": "1"})
            server.drop()
            server.delete("a")
            server.put(pod("b"))
            asked = len(server.queries)
            await asyncio.sleep(0.1)
            assert (seen.times, set(seen.pods or ())) == (times, {"a"})
            assert len(server.queries) - asked <= 6, "it is left alone in between"
            server.refuse = None
            await seen.until_like(server)
            await watched(server)
        said = [each.getMessage() for each in caplog.records]
        assert [each.split(":")[0] for each in said] == ["discovery_lost", "discovery_back"]
        assert "HTTP 503: no" in said[0]


async def test_who_may_not_watch_is_told_what_is_missing(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    server.refuse_watches = 403
    async with watching(server) as seen:
        await seen.until(lambda pods: pods == {})
        await until(lambda: server.watches >= 3)
    assert "must allow get, list and watch" in caplog.text
    assert caplog.text.count("discovery_lost") == 1


@pytest.mark.parametrize(("status", "lists"), [(429, 1), (503, 1), (500, 2), (504, 2)])
async def test_a_server_that_has_too_much_to_do_is_not_asked_for_all_of_it(
    server: ApiServer, status: int, lists: int
) -> None:
    server.put(pod("a"))
    async with watching(server) as seen:
        await watched(server)
        server.refuse_watches = status
        server.drop()
        server.put(pod("b"))
        await until(lambda: server.watches >= 2)
        server.refuse_watches = None
        await seen.until_like(server)
        assert min(server.lists, 2) == lists


async def test_what_is_told_twice_and_late_is_not_about_the_successor(server: ApiServer) -> None:
    server.put(pod("engine-0", "10.0.0.1", uid="one"))
    async with watching(server) as seen:
        await watched(server)
        server.delete("engine-0")
        server.put(pod("engine-0", "10.0.0.2", uid="two"))
        await seen.until_like(server)
        times = seen.times
        old = pod("engine-0", "10.0.0.1", uid="one")
        old["metadata"]["resourceVersion"] = str(server.version)
        server.say(json.dumps({"type": "DELETED", "object": old}).encode())
        server.put(pod("b"))
        await seen.until_like(server)
        assert seen.times == times + 1


async def test_a_token_is_read_for_every_request_and_goes_nowhere_else(server: ApiServer) -> None:
    tokens = iter(f"t{number}" for number in range(100))
    access = replace(server.api, token=lambda: next(tokens))
    async with watching(server, api=access):
        await watched(server)
        server.drop()
        await watched(server, 2)
    assert server.tokens == ["Bearer t0", "Bearer t1", "Bearer t2"]
    server.refuse = (302, {"Location": f"{server.url}{PODS}?elsewhere=1"})
    async with watching(server, api=access):
        await until(lambda: len(server.queries) >= 5)
    assert not any("elsewhere" in each for each in server.queries)


# ---- whatever happens ------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["e0", "e1", "e2"])
STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, st.integers(1, 3), st.booleans(), st.booleans()),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(st.just("replace"), NAMES, st.integers(1, 3)),
    *(st.tuples(st.just(each)) for each in ("drop", "half", "compact", "bookmark", "elsewhere", "error", "listen")),
    st.tuples(st.just("replay"), st.integers(0, 4)),
)


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 3 // 5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=25))
def test_whatever_happens_it_ends_with_what_the_server_has(steps: list[tuple[object, ...]]) -> None:
    asyncio.run(follow_through(steps))


async def follow_through(steps: list[tuple[object, ...]]) -> None:
    async with api_server() as server, watching(server) as seen:
        born = 0
        for step in steps:
            match step:
                case ("put", str(name), int(ip), bool(ready), bool(deleting)):
                    uid = server.pods[name]["metadata"]["uid"] if name in server.pods else f"uid-{(born := born + 1)}"
                    server.put(pod(name, f"10.0.0.{ip}", uid=uid, ready=ready, deleting=deleting))
                case ("delete", str(name)):
                    server.delete(name)
                case ("replace", str(name), int(ip)):
                    server.delete(name)
                    server.put(pod(name, f"10.0.1.{ip}", uid=f"uid-{(born := born + 1)}"))
                case ("half",):
                    server.drop(begun=b'{"type":"ADDED","object":{"metadata":{"name":"gho')
                case ("error",):
                    server.say(b'{"type":"ERROR","object":{"code":500}}')
                case ("replay", int(versions)):
                    server.replay = versions
                case ("listen",):
                    await asyncio.sleep(0.01)
                case (str(other),):
                    getattr(server, other)()
                case _:
                    raise AssertionError(step)
            await asyncio.sleep(0)
        await seen.until_like(server)
