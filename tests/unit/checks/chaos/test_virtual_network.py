"""Virtual sockets behave as real ones when processes freeze, die or cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tercet_checks.chaos.virtual_network import NetworkedLoop, VirtualProcess

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
