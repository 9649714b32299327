"""A hostile client, which plays tricks over raw connections and checks that the router ends each of them.

The router must refuse, answer or cut off each trick within a time limit. The arena's other checks cover the effects on
other clients.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from tercet.aio import TaskSet
from tercet_lab.chaos.hostile_bodies import (
    COMPLETIONS,
    FULL_OF_SEQUENCES,
    LABELS,
    LAST,
    LONG,
    NAMES,
    ODD,
    POISONOUS,
    WRONG,
    WRONG_ITEMS,
)
from tercet_lab.chaos.tricks import PlannedTrick, PlayedTrick, TrickKind

REFUSED_SECONDS = 30.0
"""Time limit, in seconds, for refusing a request, or for closing a connection that sends too little."""
ANSWERED_SECONDS = 180.0
"""Time limit, in seconds, for the answer to a long body, which may be served."""
LONG_HEAD = 2**20
LONG_NAME_IN_HEAD = 30_000
WRONG_IN_A_BODY, WRONG_AT_ONCE = 250, 20
WRITTEN_AT_ONCE = 64 * 1024
DRIP_SECONDS = 1.0
# Size, in bytes, of the buffers of a slow reader.
LITTLE = 1024
NOT_THE_CLIENTS = 500


class Sizes(msgspec.Struct, frozen=True):
    """The sizes of tricks: ``items`` of a long body; ``bodies`` unfinished bodies of ``body`` bytes at one time."""

    items: int
    body: int
    bodies: int = 6


class WrongAnswerToTrick(Exception):
    """The error of a trick that the router answered wrongly."""


class RawConnection:
    """A connection for raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes, until all are sent or the router closes the connection."""
        try:
            for begin in range(0, len(data), WRITTEN_AT_ONCE):
                self._writer.write(data[begin : begin + WRITTEN_AT_ONCE])
                await self._writer.drain()
        except ConnectionError:
            return  # the router may have answered before

    async def status(self) -> int:
        """Read the complete answer. Return its status, or 0 if the connection ends without an answer."""
        try:
            line = await self._reader.readline()
            while await self._reader.read(WRITTEN_AT_ONCE):
                pass
        except ConnectionError:
            line = b""
        words = line.split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    async def ended(self, seconds: float) -> bool:
        """Return True if the router closes the connection, or answers, within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._reader.read(1)
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    async def first_bytes(self) -> None:
        """Return when an answer has begun, or when the connection has ended."""
        with suppress(ConnectionError):
            await self._reader.read(1)

    def leave(self) -> None:
        """Abort the connection."""
        self._writer.transport.abort()


class Adversary:
    """A client that plays tricks on the router at ``host`` and ``port``. ``played`` has the finished tricks.

    ``others`` are the addresses of other servers that buffer bodies, such as a model router.
    """

    def __init__(
        self, host: str, port: int, model: str, seed: int, sizes: Sizes, clock: Callable[[], float],
        others: Sequence[tuple[str, int]] = (),
    ) -> None:  # fmt: skip
        self.played: list[PlayedTrick] = []
        self._doors = ((host, port), *others)
        self._model = model
        self._seed = seed
        self._sizes = sizes
        self._clock = clock
        self._tasks = TaskSet()

    async def run(self, planned: Iterable[PlannedTrick], sleep_until: Callable[[float], Awaitable[object]]) -> None:
        """Play each trick at its time; return when the last one has begun."""
        for trick in planned:
            await sleep_until(trick.at)
            self._tasks.spawn(self.play(trick))

    async def settle(self) -> None:
        """Return when all tricks have ended; each has a time limit."""
        await self._tasks.wait(ANSWERED_SECONDS + REFUSED_SECONDS)

    async def play(self, planned: PlannedTrick) -> None:
        """Play one trick, and add its result to ``played``."""
        trick = Trick(self._doors, self._model, random.Random(f"{self._seed} trick {planned.number}"), self._sizes)
        began, wrong = self._clock(), ""
        limit = ANSWERED_SECONDS if planned.kind == "long_bodies" else REFUSED_SECONDS
        try:
            async with asyncio.timeout(limit):
                await PLAYS[planned.kind](trick)
        except TimeoutError:
            wrong = f"{trick.what}: the router neither answered nor closed the connection within {limit:g} s"
        except WrongAnswerToTrick as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"{trick.what}: cannot connect to the router: {error!r}"
        finally:
            trick.leave()
        self.played.append(
            PlayedTrick(
                planned=planned, began=began, ended=self._clock(), statuses=tuple(trick.statuses), wrong=wrong
            )
        )  # fmt: skip


class Trick:
    """A trick that is being played at ``door``. ``what`` describes its variant, ``name`` is the id of its requests."""

    def __init__(
        self, doors: Sequence[tuple[str, int]], model: str, chance: random.Random, sizes: Sizes
    ) -> None:  # fmt: skip
        self.statuses: list[int] = []
        self.what = ""
        self.chance = chance
        self.sizes = sizes
        self.doors = doors
        self.door = doors[0]
        self._model = model
        self.name = f"adversary-{chance.getrandbits(64):x}"
        self._open: list[RawConnection] = []

    async def connect(self, limit: int = 64 * 1024) -> RawConnection:
        """Open one more connection, with a read buffer of about ``limit`` bytes."""
        connection = RawConnection(*await asyncio.open_connection(*self.door, limit=limit))
        self._open.append(connection)
        return connection

    def leave(self) -> None:
        """Close all connections."""
        for connection in self._open:
            connection.leave()

    def head(self, path: str, length: int, labels: Sequence[str] = ("content-type: application/json",)) -> bytes:
        """Return the head of a request with a body of ``length`` bytes; ``labels`` are fields that describe it."""
        named = [f"x-request-id: {self.name}"] if self.name else []
        fields = ["host: router", *labels, "connection: close", *named, f"content-length: {length}"]
        return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "\r\n"]).encode()

    def encoded(self, fields: Mapping[str, Any]) -> bytes:
        """Return a body as JSON, with the model's name."""
        return msgspec.json.encode({"model": self._model, **fields})

    async def ask(self, path: str, body: bytes) -> int:
        """Send a complete request. Return the status of its answer, or 0 without an answer."""
        connection = await self.connect()
        await connection.send(self.head(path, len(body)) + body)
        status = await connection.status()
        self.statuses.append(status)
        return status

    async def must_be(self, allowed: Iterable[int], path: str, body: bytes) -> None:
        """Send a request. Raise :class:`WrongAnswerToTrick` if the status of its answer is not in ``allowed``."""
        status = await self.ask(path, body)
        if status not in allowed:
            raise WrongAnswerToTrick(f"{self.what}: answered with {status}")

    def stream(self) -> bytes:
        """Return a body that requests a stream of 16 to 64 tokens."""
        return self.encoded({"prompt": "the same again", "max_tokens": self.chance.randint(16, 64), "stream": True})


# ---- the tricks ----------------------------------------------------------------------------------------------


async def _many_sequences(trick: Trick) -> None:
    trick.what, path, fields = trick.chance.choice(FULL_OF_SEQUENCES)
    await trick.must_be((400,), path, trick.encoded(fields))


async def _long_bodies(trick: Trick) -> None:
    trick.what, path, fields = trick.chance.choice(LONG)
    body = trick.encoded(fields(round(trick.sizes.items * trick.chance.uniform(0.2, 1.0))))
    status = await trick.ask(path, body)
    if not 0 < status < NOT_THE_CLIENTS:
        raise WrongAnswerToTrick(f"{trick.what} ({len(body)} bytes): answered with {status}")


async def _wrong_items(trick: Trick) -> None:
    what, path, fields = trick.chance.choice(WRONG_ITEMS)
    item = trick.chance.choice(WRONG)
    trick.what, body = f"{what} that are {item!r}", trick.encoded(fields([item] * WRONG_IN_A_BODY))
    async with asyncio.TaskGroup() as group:
        for _ in range(WRONG_AT_ONCE):
            group.create_task(trick.ask(path, body))
    if wrong := [status for status in trick.statuses if status not in (400, 404, 429)]:
        raise WrongAnswerToTrick(f"{trick.what}: answered with {wrong[0]}")


async def _odd_text(trick: Trick) -> None:
    trick.what, body = trick.chance.choice(ODD)
    await trick.must_be((400,), "/v1/completions", body)


async def _odd_labels(trick: Trick) -> None:
    labels = trick.chance.choice(LABELS)
    what, path, fields = trick.chance.choice(LONG)
    trick.what, body = f"{what} under {'; '.join(labels)}", trick.encoded(fields(trick.sizes.items))
    connection = await trick.connect()
    await connection.send(trick.head(path, len(body), labels) + body)
    trick.statuses.append(await connection.status())
    if trick.statuses[-1] not in (400, 413, 415):
        raise WrongAnswerToTrick(f"{trick.what}: answered with {trick.statuses[-1]}")


async def _poisonous_grammars(trick: Trick) -> None:
    trick.what, structure = trick.chance.choice(POISONOUS)
    body = trick.encoded({"prompt": "x", "max_tokens": 4, "structured_outputs": structure})
    await trick.must_be((400, 413), "/v1/completions", body)


async def _unfinished_bodies(trick: Trick) -> None:
    trick.what, size = "a body that does not end", trick.sizes.body
    trick.door = trick.chance.choice(trick.doors)

    async def one() -> None:
        connection = await trick.connect()
        await connection.send(trick.head("/v1/completions", size + 1) + b" " * size)
        trick.statuses.append(await connection.status())

    async with asyncio.TaskGroup() as group:
        for _ in range(trick.sizes.bodies):
            group.create_task(one())
    if wrong := [status for status in trick.statuses if status not in (0, 408, 413, 429)]:
        raise WrongAnswerToTrick(f"{trick.what}: answered with {wrong[0]}")


async def _unfinished_heads(trick: Trick) -> None:
    trick.what, connection = "a head that does not end", await trick.connect()
    await connection.send(b"POST /v1/completions HTTP/1.1\r\nx-a: ")
    while not await connection.ended(DRIP_SECONDS):
        await connection.send(b"a")
    trick.statuses.append(408)


async def _long_heads(trick: Trick) -> None:
    trick.what, connection = "a head of a megabyte", await trick.connect()
    name = trick.chance.choice((b"x-a: ", b"x-request-id: ", b"authorization: Bearer ", b"cookie: "))
    await connection.send(b"GET /v1/models HTTP/1.1\r\n" + name + b"a" * LONG_HEAD + b"\r\n\r\n")
    status = await connection.status()
    trick.statuses.append(status)
    if status not in (0, 431):
        raise WrongAnswerToTrick(f"{trick.what}: answered with {status}")


async def _long_names(trick: Trick) -> None:
    what, fields = trick.chance.choice(NAMES)
    name = trick.name.ljust(trick.sizes.body // 2, "n")
    # An id in a body counts only without one in the head.
    trick.name = "" if what == "request_id" else name[:LONG_NAME_IN_HEAD]
    trick.what = f"{what} of {len(name)} characters"
    await trick.must_be((200, 400, 404), COMPLETIONS, trick.encoded({"prompt": "x", **LAST, **fields(name)}))


async def _silence(trick: Trick) -> None:
    trick.what, connection = "a connection that says nothing", await trick.connect()
    trick.statuses.append(await connection.status())


async def _slow_reading(trick: Trick) -> None:
    trick.what, body = "a stream that is not read", trick.stream()
    connection = await trick.connect(LITTLE)
    await connection.send(trick.head("/v1/completions", len(body)) + body)
    await asyncio.sleep(trick.chance.uniform(1.0, REFUSED_SECONDS / 2))


async def _leaving(trick: Trick) -> None:
    body = trick.stream()
    head = trick.head("/v1/completions", len(body))
    part = trick.chance.choice(("head", "body", "wait", "answer"))
    trick.what, connection = f"a client that leaves in the {part}", await trick.connect()
    await connection.send({"head": head[:40], "body": head + body[:20]}.get(part, head + body))
    if part == "answer":
        await connection.first_bytes()
    await asyncio.sleep(trick.chance.uniform(0.0, 0.2))


PLAYS: Mapping[TrickKind, Callable[[Trick], Awaitable[None]]] = {
    "many_sequences": _many_sequences,
    "long_bodies": _long_bodies,
    "wrong_items": _wrong_items,
    "odd_text": _odd_text,
    "odd_labels": _odd_labels,
    "poisonous_grammars": _poisonous_grammars,
    "unfinished_bodies": _unfinished_bodies,
    "unfinished_heads": _unfinished_heads,
    "long_heads": _long_heads,
    "long_names": _long_names,
    "silence": _silence,
    "slow_reading": _slow_reading,
    "leaving": _leaving,
}
