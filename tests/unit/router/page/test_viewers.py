"""Viewers: one producer for all, none without a viewer, and a slow one that skips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from tercet.protocol import NoSpace, ShuttingDown
from tercet.router.page import watch as module
from tercet.router.page.records import Frame, reported_loads
from tercet.router.page.watch import FOR_ADMINS, MOST_PENDING, MOST_VIEWERS, FleetWatch, Viewers, about_service
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.router.conftest import LiveRouter


def frames_in(part: bytes) -> list[Frame]:
    return [msgspec.json.decode(event.removeprefix(b"data: "), type=Frame) for event in part.split(b"\n\n") if event]


class Gallery:
    """Viewers of a router; ``made`` counts the watches, ``over`` is set when the router shuts down."""

    def __init__(self, router: LiveRouter) -> None:
        self.router, self.made, self.over = router, 0, False
        self.viewers = Viewers(self._watch, lambda: 2, lambda: self.over)

    def _watch(self) -> FleetWatch:
        self.made += 1
        service = self.router.service
        return FleetWatch(service, reported_loads(self.router.fleet), lambda: about_service(service, "m"))

    @property
    def is_quiet(self) -> bool:
        return not self.router.service.observers


@pytest.fixture
async def gallery(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gallery]:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    gallery = Gallery(router)
    yield gallery
    await gallery.viewers.close()


async def until_quiet(gallery: Gallery) -> None:
    await until(lambda: gallery.is_quiet)


async def test_a_viewer_gets_a_whole_frame_and_then_changes(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("admin")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        first = frames_in(await anext(stream))
        assert [frame.whole for frame in first] == [True]
        assert [seat.name for seat in first[0].engines or ()] == ["p", "d"]
        await gallery.router.ask()
        later = list[Frame]()
        while not any(frame.ends for frame in later):
            later += frames_in(await anext(stream))
        assert not any(frame.whole for frame in later)
        assert [lane.seq_id for frame in later for lane in frame.lanes] == ["s1"]


async def test_clients_see_less_of_the_same_frame(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("client")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        await anext(stream)
        await gallery.router.ask()
        lanes = list[str]()
        while not lanes:
            lanes = [lane.seq_id for frame in frames_in(await anext(stream)) for lane in frame.lanes]
        assert lanes == [""]


async def test_nothing_is_observed_without_a_viewer(gallery: Gallery) -> None:
    assert gallery.is_quiet
    one, two = (gallery.viewers.enter("admin") for _ in range(2))
    first, second = gallery.viewers.stream(one), gallery.viewers.stream(two)
    assert await anext(first) is await anext(second)  # made once
    assert gallery.made == 1
    await first.aclose()
    assert not gallery.is_quiet
    await second.aclose()
    await until_quiet(gallery)
    assert len(gallery.viewers) == 0


async def test_the_next_viewer_finds_one_producer(gallery: Gallery) -> None:
    for _ in range(3):  # before the producer has noticed that the last one left
        stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
        await anext(stream)
        await stream.aclose()
    assert gallery.made == 1
    await until_quiet(gallery)
    stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
    await anext(stream)
    assert gallery.made == 2
    await stream.aclose()


async def test_a_slow_viewer_is_never_behind_by_more_than_a_few_frames(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("admin")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        await anext(stream)
        async with asyncio.timeout(LONGEST_WAIT_S):
            while not viewer.is_behind:
                assert len(viewer._pending) <= MOST_PENDING
                await asyncio.sleep(0.005)
        assert len(viewer._pending) == 0
        assert [frame.whole for frame in frames_in(await anext(stream))] == [True]


async def test_there_is_a_most_of_viewers(gallery: Gallery) -> None:
    gallery.viewers.enter("worker")
    entered = [gallery.viewers.enter("client") for _ in range(MOST_VIEWERS - FOR_ADMINS)]
    with pytest.raises(NoSpace, match="for administrators; close one"):
        gallery.viewers.enter("client")
    entered += [gallery.viewers.enter("admin") for _ in range(FOR_ADMINS)]
    with pytest.raises(NoSpace, match="close one"):
        gallery.viewers.enter("admin")
    stream = gallery.viewers.stream(entered[0])
    await anext(stream)
    await stream.aclose()
    gallery.viewers.enter("admin")


async def test_every_stream_ends_when_the_router_shuts_down(gallery: Gallery) -> None:
    stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
    await anext(stream)
    gallery.over = True
    async with asyncio.timeout(LONGEST_WAIT_S):
        _ = [part async for part in stream]
    await until_quiet(gallery)
    with pytest.raises(ShuttingDown):
        gallery.viewers.enter("admin")
