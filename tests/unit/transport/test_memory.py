"""KV as bytes: whole blocks or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest
from tercet.transport import BufferMemory
from tercet.transport.sockets import parse_address

LAYERS, BLOCKS, SIZE = 2, 4, 8


@given(st.integers(-5, 5), st.integers(-9, 9), st.integers(-3, 9))
def test_blocks_are_whole_or_refused(layer: int, first: int, count: int) -> None:
    buffers = [bytearray(range(n, n + BLOCKS * SIZE)) for n in (0, 100)]
    memory = BufferMemory([memoryview(buffer) for buffer in buffers], BLOCKS)
    if 0 <= layer < LAYERS and first >= 0 and count >= 1 and first + count <= BLOCKS:
        assert bytes(memory.read(layer, first, count)) == bytes(buffers[layer][first * SIZE : (first + count) * SIZE])
        memory.write(layer, first, memoryview(b"\xff" * (count * SIZE)))
        assert buffers[layer].count(0xFF) == count * SIZE
        return
    before = [bytes(buffer) for buffer in buffers]
    with pytest.raises(BadRequest):
        memory.read(layer, first, count)
    with pytest.raises(BadRequest):
        memory.write(layer, first, memoryview(b"\xff" * (max(count, 0) * SIZE)))
    assert [bytes(buffer) for buffer in buffers] == before


@pytest.mark.parametrize("sizes", [(32, 40), (30, 30), ()])
def test_layers_must_be_equal_and_cut_into_blocks(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="equal blocks"):
        BufferMemory([memoryview(bytearray(size)) for size in sizes], BLOCKS)


def test_addresses() -> None:
    assert parse_address("tcp://10.0.0.1:65535") == ("10.0.0.1", 65535)
    assert parse_address("tcp://[::1]:80") == parse_address("tcp://::1:80") == ("::1", 80)


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "tcp://host:", "tcp://:80", "tcp://host:65536", "tcp://host:-1",
                "tcp://host:8x", "tcp://host:²", "shm://host:80", "host:80"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(BadRequest):
        parse_address(address)
