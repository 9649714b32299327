"""KV between simulated engines of different processes: no bytes travel, only the news that they would be there.

A sender's link out is booked as in one process. The receiver's link in is not: senders in different processes do not
wait for each other there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType

import aiohttp
import msgspec

from tercet.aio import TaskSet
from tercet.protocol import BadRequest, KVAddrInfo
from tercet.protocol.wire import PREFIX
from tercet.sim.network import Network, SendTarget
from tercet.sim.step_times import Transfer

DELIVER = f"{PREFIX}/sim/deliver"
ADDRESS = re.compile(r"http://[^/\s]+:[0-9]{1,5}")
# The answer needs no engine step, so a peer that takes this long is gone.
ANSWER = aiohttp.ClientTimeout(total=10.0)
# Of two calls of one request the second brings its own copy of the prompt, so there is little to find again.
PROMPTS_KEPT = 256


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/sim/deliver``: the KV of ``[begin, end)`` would be under this lease now."""

    lease: str
    begin: int
    end: int


class Accepted(msgspec.Struct, frozen=True):
    """Its answer: whether the lease took it."""

    accepted: bool


class HttpNetwork(Network):
    """The network of one engine in a process of its own; reaches all others by the address in their reservations."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(PROMPTS_KEPT)
        self._transfer = transfer
        self._session: aiohttp.ClientSession | None = None
        self._posting = TaskSet()

    async def __aenter__(self) -> HttpNetwork:
        self._session = aiohttp.ClientSession(timeout=ANSWER, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._posting.close()
        if self._session is not None:
            await self._session.close()

    def find(self, info: KVAddrInfo) -> SendTarget:
        """See :meth:`tercet.sim.network.Network.find`; raises ``BadRequest`` for what no simulated engine returned."""
        addresses = [address for rank in info.ranks for address in rank.addresses]
        if info.transport != "sim" or len(addresses) != 1 or not ADDRESS.fullmatch(addresses[0]):
            raise BadRequest("kv_addr_info: not one that prep_recv of a simulated engine returned", "kv_addr_info")
        return RemoteEngine(info.engine, addresses[0], self)

    @property
    def transfer(self) -> Transfer:
        """How fast KV travels; peers are taken to be as fast as this engine."""
        return self._transfer

    def post(self, url: str, delivery: Delivery, answer: Callable[[bool], None]) -> None:
        """Tell a peer in the background; ``answer`` is told False when it cannot be reached."""
        self._posting.spawn(self._deliver(url, delivery, answer))

    async def _deliver(self, url: str, delivery: Delivery, answer: Callable[[bool], None]) -> None:
        if self._session is None:
            raise RuntimeError("HttpNetwork is used outside its async context")
        try:
            async with self._session.post(url + DELIVER, data=msgspec.json.encode(delivery)) as response:
                body = await response.read()
                answer(response.status == 200 and msgspec.json.decode(body, type=Accepted).accepted)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            answer(False)


class RemoteEngine:
    """An engine of another process, as :class:`~tercet.sim.network.SendTarget`."""

    def __init__(self, name: str, url: str, network: HttpNetwork) -> None:
        self._name = name
        self._url = url
        self._network = network

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._name

    @property
    def transfer(self) -> Transfer:
        """How fast KV reaches it."""
        return self._network.transfer

    def expects(self, lease: str) -> bool:
        """Unknown here until the KV has arrived."""
        return True

    def receive(self, lease: str, begin: int, end: int, answer: Callable[[bool], None]) -> None:
        """See :meth:`tercet.sim.network.SendTarget.receive`."""
        self._network.post(self._url, Delivery(lease, begin, end), answer)
