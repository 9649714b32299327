"""Virtual sockets behave as real ones when processes freeze, die or cannot be reached, and a proxy between real ones
that can be cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tercet_checks.chaos.real_fleet import CuttableProxy
from tercet_checks.chaos.virtual_network import NetworkedLoop, VirtualProcess
from tests.longest_wait import LONGEST_WAIT_S

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class World:
    """A client and a server that echoes."""

    def __init__(self, loop: NetworkedLoop) -> None:
        self.loop = loop
        self.client, self.server = VirtualProcess(loop, "10.0.0.1"), VirtualProcess(loop, "10.0.0.2")
        self.lost: list[Exception | None] = []
        self.received = b""

    async def listen(self) -> None:
        world = self

        class Echo(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport

            def data_received(self, data: bytes) -> None:
                assert isinstance(self.transport, asyncio.Transport)
                self.transport.write(data)

            def connection_lost(self, exc: Exception | None) -> None:
                world.lost.append(exc)

        with self.server.enter():
            await self.loop.create_server(Echo, "10.0.0.2", 80)

    async def connect(self) -> asyncio.Transport:
        world = self

        class Reader(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                world.received += data

            def connection_lost(self, exc: Exception | None) -> None:
                world.lost.append(exc)

        with self.client.enter():
            transport, _ = await self.loop.create_connection(Reader, "10.0.0.2", 80)
        return transport


def run(check: Callable[[World], Awaitable[None]]) -> None:
    loop = NetworkedLoop()

    async def main() -> None:
        world = World(loop)
        await world.listen()
        await check(world)

    loop.run_until_complete(main())
    assert loop.complaints == []
    loop.close()


def test_bytes_arrive_in_order_and_both_ends_hear_of_the_end() -> None:
    async def check(world: World) -> None:
        transport = await world.connect()
        for number in range(100):
            transport.write(bytes([number]))
        await asyncio.sleep(1)
        assert world.received == bytes(range(100))
        transport.close()
        await asyncio.sleep(1)
        assert world.lost == [None, None]
        assert not world.client.transports
        assert not world.server.transports

    run(check)


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("how", ["freeze", "cut_off"])
def test_what_is_sent_meanwhile_arrives_later(who: str, how: str) -> None:
    async def check(world: World) -> None:
        transport = await world.connect()
        process = getattr(world, who)
        getattr(process, how)()
        transport.write(b"hello")
        await asyncio.sleep(100)
        assert world.received == b""
        getattr(process, how)(False)
        await asyncio.sleep(1)
        assert world.received == b"hello"
        assert world.lost == []

    run(check)


def test_the_peers_of_a_killed_process_get_a_reset_and_nobody_connects_to_it() -> None:
    async def check(world: World) -> None:
        await world.connect()
        await asyncio.sleep(1)
        world.server.kill()
        await asyncio.sleep(1)
        assert [type(error) for error in world.lost] == [type(None), ConnectionResetError]
        with pytest.raises(ConnectionRefusedError):
            await world.connect()
        world.server = VirtualProcess(world.loop, "10.0.0.2")
        await world.listen()
        (await world.connect()).write(b"again")
        await asyncio.sleep(1)
        assert world.received == b"again"

    run(check)


def test_a_server_does_not_lose_a_connection_that_it_was_not_given() -> None:
    async def check(world: World) -> None:
        await world.connect()
        world.server.kill()  # on the way to it
        await asyncio.sleep(1)
        assert [type(error) for error in world.lost] == [ConnectionResetError]  # the client's end

    run(check)


def test_a_reset_arrives_once_the_network_is_back() -> None:
    async def check(world: World) -> None:
        await world.connect()
        await asyncio.sleep(1)  # the server has the connection, too
        world.client.cut_off()
        world.server.kill()
        await asyncio.sleep(100)
        assert world.lost == [None]  # the server's own end
        world.client.cut_off(False)
        await asyncio.sleep(1)
        assert isinstance(world.lost[1], ConnectionResetError)

    run(check)


@pytest.mark.parametrize("how", ["freeze", "cut_off"])
def test_who_closes_meanwhile_is_heard_later(how: str) -> None:
    async def check(world: World) -> None:
        transport = await world.connect()
        await asyncio.sleep(1)
        getattr(world.client, how)()
        transport.close()
        await asyncio.sleep(100)
        assert len(world.server.transports) == 1
        getattr(world.client, how)(False)
        await asyncio.sleep(1)
        assert not world.server.transports

    run(check)


def test_what_a_frozen_process_would_have_said_is_never_said_if_it_is_killed() -> None:
    async def check(world: World) -> None:
        transport = await world.connect()
        transport.write(b"hello")
        world.server.freeze()
        await asyncio.sleep(1)
        world.server.kill()
        await asyncio.sleep(1)
        assert world.received == b""
        assert transport.is_closing()

    run(check)


def test_connecting_waits_for_a_lost_route_and_not_for_a_frozen_process() -> None:
    async def check(world: World) -> None:
        world.server.freeze()
        await asyncio.wait_for(world.connect(), 1)  # the kernel answers
        world.server.freeze(False)
        world.server.cut_off()
        connecting = asyncio.ensure_future(world.connect())
        await asyncio.sleep(50)
        assert not connecting.done()
        world.server.cut_off(False)
        await asyncio.wait_for(connecting, 1)

    run(check)


def test_a_writer_is_told_to_wait_for_a_reader_who_does_not_read() -> None:
    async def check(world: World) -> None:
        transport = await world.connect()
        paused: list[str] = []
        protocol = transport.get_protocol()
        protocol.pause_writing = lambda: paused.append("pause")  # type: ignore[method-assign]
        protocol.resume_writing = lambda: paused.append("resume")  # type: ignore[method-assign]
        world.server.freeze()
        for _ in range(20):
            transport.write(b"x" * 64 * 1024)
        await asyncio.sleep(1)
        assert paused == ["pause"]
        assert transport.get_write_buffer_size() > 0
        world.server.freeze(False)
        await asyncio.sleep(1)
        assert paused == ["pause", "resume"]
        assert len(world.received) == 20 * 64 * 1024

    run(check)


HOST = "127.0.0.1"
TOLD = (b"127.0.0.1:11111", b"127.0.0.1:22222")


@asynccontextmanager
async def echoing() -> AsyncGenerator[CuttableProxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(b"<" + data + b">")
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    async with server, CuttableProxy(HOST, server.sockets[0].getsockname()[1], TOLD) as proxy:
        yield proxy


async def test_bytes_pass_and_addresses_are_replaced() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b'{"address": "127.0.0.1:11111"}')
        assert await reader.readuntil(b">") == b'<{"address": "127.0.0.1:22222"}>'
        writer.close()


async def test_what_is_cut_waits_and_new_connections_do_too() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"one")
        assert await reader.readuntil(b">") == b"<one>"
        proxy.cut()
        late_reader, late_writer = await asyncio.open_connection(HOST, proxy.port)
        for each in (writer, late_writer):
            each.write(b"two")
        waiting = [asyncio.ensure_future(each.readuntil(b">")) for each in (reader, late_reader)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        proxy.heal()
        assert await asyncio.gather(*waiting) == [b"<two>", b"<two>"]
        for each in (writer, late_writer):
            each.close()


async def test_the_end_of_one_side_is_the_end_of_the_other() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_nobody_behind_it_is_a_lost_connection() -> None:
    async with CuttableProxy(HOST, 1, TOLD) as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
