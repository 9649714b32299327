"""What connections of one sender share, from the first to the last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from tercet.transport.backends import Copies
from tercet.transport.frames import ProtocolViolation
from tercet.transport.session import MAX_STREAMS, REMEMBERED_REFUSED, Session, Sessions


class CountingReader:
    def __init__(self) -> None:
        self.closed = 0

    at_a_time = 1024

    def read(self, copies: Copies) -> None:
        raise AssertionError("nobody reads here")

    def word(self, there: int) -> int:
        raise AssertionError("nobody reads here")

    def close(self) -> None:
        self.closed += 1


def session(name: str = "a", reader: CountingReader | None = None) -> Session:
    return Session(name, lambda _data: None, reader)


def test_a_session_lasts_as_long_as_one_of_its_connections() -> None:
    sessions, first = Sessions(), session()
    sessions.begin(first)
    assert [sessions.join("a") for _ in range(2)] == [first, first]
    assert [sessions.leave(first) for _ in range(2)] == [False, False]
    assert len(sessions) == 1
    assert sessions.leave(first)
    assert len(sessions) == 0


def test_a_name_is_taken_until_the_last_connection_is_over() -> None:
    sessions, first = Sessions(), session()
    sessions.begin(first)
    with pytest.raises(ProtocolViolation, match="begins once"):
        sessions.begin(session())
    sessions.begin(session("b"))
    sessions.leave(first)
    sessions.begin(session())
    assert len(sessions) == 2


def test_nobody_joins_what_is_not_there() -> None:
    sessions, first = Sessions(), session()
    with pytest.raises(ProtocolViolation, match="no such session"):
        sessions.join("a")
    sessions.begin(first)
    sessions.leave(first)
    with pytest.raises(ProtocolViolation, match="no such session"):
        sessions.join("a")


def test_streams_are_limited() -> None:
    sessions, first = Sessions(), session()
    sessions.begin(first)
    for _ in range(MAX_STREAMS - 1):
        sessions.join("a")
    with pytest.raises(ProtocolViolation, match="too many streams"):
        sessions.join("a")
    assert first.streams == MAX_STREAMS
    sessions.leave(first)
    assert sessions.join("a") is first


def test_a_reader_belongs_to_one_connection_and_is_closed_with_it() -> None:
    sessions, reader = Sessions(), CountingReader()
    first = session(reader=reader)
    sessions.begin(first)
    with pytest.raises(ProtocolViolation, match="one connection"):
        sessions.join("a")
    assert reader.closed == 0
    assert sessions.leave(first)
    assert reader.closed == 1


def test_a_refusal_is_news_once() -> None:
    first = session()
    assert [first.refuse(send) for send in (1, 1, 2, 1, 2)] == [True, False, True, False, False]


def test_refusals_are_remembered_up_to_a_limit_the_latest_ones() -> None:
    first = session()
    sends = range(1, 3 * REMEMBERED_REFUSED)
    assert all(first.refuse(send) for send in sends)
    assert list(first.refused) == list(sends)[-REMEMBERED_REFUSED:]


@pytest.fixture
def busy_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("busy_switching")
def test_streams_refuse_at_the_same_time() -> None:
    """Each refusal is news to one thread, and none of them trips over another's."""
    first, news, failed = session(), list[int](), list[BaseException]()
    together = threading.Barrier(4)

    def refuse() -> None:
        together.wait()
        try:
            news.extend(send for send in range(1, 4 * REMEMBERED_REFUSED) if first.refuse(send))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(first.refused) == REMEMBERED_REFUSED
    assert set(news) == set(range(1, 4 * REMEMBERED_REFUSED))
