"""Buffers and places, for one system call after another: whatever the sizes, all arrives, and waiting is told apart."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.sockets import Vector, address_of, nowhere, send_all, wait_in_calls


def gather(vector: Vector) -> bytes:
    """What is in the places that are left."""
    left = vector._places[vector._first :]
    return b"".join(ctypes.string_at(address, length) for address, length in left.tolist())


def in_one_place(buffer: bytearray) -> Vector:
    return Vector(np.array([(address_of(buffer), len(buffer))], dtype=np.uint64), buffer, len(buffer))


def in_places(buffer: bytearray) -> Vector:
    """Three places, the buffer's last bytes first."""
    third, at = len(buffer) // 3, address_of(buffer)
    rows = [(at + 2 * third, len(buffer) - 2 * third), (at, third), (at + third, third)]
    return Vector(np.array([row for row in rows if row[1]], dtype=np.uint64), buffer, len(buffer))


BOTH = pytest.mark.parametrize("make", [in_one_place, in_places])


@pytest.mark.parametrize(("source", "target"), [(in_one_place, in_one_place), (in_places, in_places)])
@given(st.binary(min_size=1, max_size=300_000))
def test_what_is_sent_arrives_in_its_places(
    source: Callable[[bytearray], Vector], target: Callable[[bytearray], Vector], data: bytes
) -> None:
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            wait_in_calls(end, 0.01, 0.01)
        sent, got = source(bytearray(data)), bytearray(len(data))
        into = target(got)
        while into.left:
            if sent.left:
                sent.advance(sent.send(near) or 0)
            into.advance(into.receive(far) or 0)
        assert got == data
        assert sent.left == 0


@BOTH
def test_rest_is_what_is_left(make: Callable[[bytearray], Vector]) -> None:
    data = make(bytearray(b"abcdefghi"))
    whole = gather(data)
    data.advance(4)
    assert (gather(data), data.left) == (whole[4:], 5)


@BOTH
def test_nothing_to_read_and_the_end_are_told_apart(make: Callable[[bytearray], Vector]) -> None:
    near, far = socket.socketpair()
    with far:
        wait_in_calls(far, 0.01, 0.01)
        into = make(bytearray(3))
        assert into.receive(far) is None
        near.close()
        assert into.receive(far) == 0


def test_a_peer_that_takes_nothing_is_a_timeout() -> None:
    near, far = socket.socketpair()
    with near, far:
        wait_in_calls(near, 0.01, 0.01)
        with pytest.raises(TimeoutError):
            send_all(near, in_places(bytearray(10_000_000)))


@given(st.integers(0, 200_000))
def test_what_nobody_wants_is_the_same_few_bytes(nbytes: int) -> None:
    scratch = memoryview(bytearray(b"x" * 4096))
    assert gather(nowhere(nbytes, scratch)) == b"x" * nbytes
