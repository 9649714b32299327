"""The run of a suite: each check has its own names and prompts, and afterwards the engines hold nothing for it."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec

from tercet.protocol import BadRequest, EngineStatus
from tercet.settings.declaration import near
from tercet_lab.conformance.engine_calls import BrokenPromise, Call, EngineUnderTest, LiveGeneration

NEEDS_PEER = "needs a second engine: --peer URL"
NEEDS_STATUS = "the check `status` failed, and the others build on it"
POLL_SECONDS = 0.02
# Token ids of prompts: any vocabulary has them, and special tokens are mostly outside.
FIRST_TOKEN, LAST_TOKEN = 200, 999
SHORTEST_UNIT = 16
OUTPUT_TOKENS = 8
HOLDINGS = ("leases", "sends", "running", "waiting")
State = Literal["passed", "failed", "skipped"]


class Skip(Exception):
    """The check cannot be made here; the text says why."""


class VerbCheck(msgspec.Struct, frozen=True):
    """One check: what the protocol promises (``promise``), and what an engine's author does if it fails."""

    name: str
    promise: str
    remedy: str
    needs_peer: bool
    run: Callable[[EngineTrial], Awaitable[None]]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a check: for a failure ``what`` was wrong, and the call; for a skipped one the reason."""

    check: str
    state: State
    promise: str
    seconds: float
    what: str = ""
    sent: str = ""
    came: str = ""
    remedy: str = ""


CHECKS: list[VerbCheck] = []


def check(remedy: str, needs_peer: bool = False) -> Callable[[Callable[[EngineTrial], Awaitable[None]]], None]:
    """Return a decorator that adds a check; the function's docstring is the promise."""

    def add(run: Callable[[EngineTrial], Awaitable[None]]) -> None:
        name, promise = getattr(run, "__name__", "").replace("_", "-"), " ".join((run.__doc__ or "").split())
        CHECKS.append(VerbCheck(name, promise, remedy, needs_peer, run))

    return add


class EngineTrial:
    """What one check works with: the engine, its status at the start, perhaps a peer, and new prompts.

    ``unit`` is the block size, or the smallest multiple of it that has 16 tokens; prompts have up to 8 units.
    """

    def __init__(self, name: str, engine: EngineUnderTest, peer: EngineUnderTest | None, status: EngineStatus) -> None:
        self.engine = engine
        self.at_start = status
        self.block = status.block_size
        self.unit = self.block * -(-SHORTEST_UNIT // self.block)
        self._peer = peer
        self._random = random.Random(name)
        self._seq_ids: list[str] = []

    @property
    def peer(self) -> EngineUnderTest:
        if self._peer is None:
            raise Skip(NEEDS_PEER)
        return self._peer

    def tokens(self, length: int) -> list[int]:
        """Return new tokens; every run has the same."""
        return [self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]

    def call(self, prompt: Sequence[int] | None = None, max_tokens: int = OUTPUT_TOKENS, **fields: Any) -> Call:
        """Return the fields that calls for one new sequence share: by default a prompt of three units and a bit."""
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        prompt = self.tokens(3 * self.unit + 7) if prompt is None else prompt
        names = {"seq_id": uuid.uuid4().hex, "cache_salt": uuid.uuid4().hex}
        self._seq_ids.append(names["seq_id"])
        return {"prompt": list(prompt), "sampling_params": sampling, **names, **fields}

    async def abort_all(self) -> None:
        """End what a failed check has left, so that the next check begins with engines at rest."""
        for engine in [self.engine, *([self._peer] if self._peer else [])]:
            for seq_id in self._seq_ids:
                with suppress(BrokenPromise):
                    await engine.call("abort", {"seq_id": seq_id})

    async def alone(self, call: Call, engine: EngineUnderTest | None = None) -> list[int]:
        """Return the tokens of one engine alone, from no cache, for a call's prompt."""
        names = {"seq_id": uuid.uuid4().hex, "cache_salt": uuid.uuid4().hex}
        return (await (engine or self.engine).generate({**call, **names})).tokens

    async def decodes(
        self, engine: EngineUnderTest, call: Call, received: int | None, output: Sequence[int] = (), begin: int = 0
    ) -> LiveGeneration:
        """Generate on ``received`` tokens, any number if None; the output must be that of the engine alone."""
        stream = await engine.generate(call, begin=begin, output=output)
        expected = await self.alone(call, engine)  # afterwards: KV must not have more time to arrive
        usage, total = stream.usage, len(call["prompt"]) + len(output)
        if received is not None:
            counts = usage.received == received and usage.computed == total - received
            stream.require(counts, f"of {total} tokens, {received} must be received and {total - received} computed")
        stream.require([*output, *stream.tokens] == expected, f"after {list(output)} {stream.tokens}, alone {expected}")
        return stream

    async def until(
        self, engine: EngineUnderTest, what: str, holds: Callable[[EngineStatus], object], within: float = 0.0
    ) -> EngineStatus:
        """Wait until an engine's status shows something; ``what`` is wrong if it does not ``within`` some seconds."""
        loop = asyncio.get_running_loop()
        within = within or engine.patience
        deadline = loop.time() + within
        while True:
            answer = await engine.call("status")
            if holds(status := answer.decoded(EngineStatus)):
                return status
            answer.require(loop.time() < deadline, f"after {within:g} s {what}")
            await asyncio.sleep(POLL_SECONDS)

    async def until_given_back(self, engine: EngineUnderTest, before: EngineStatus, within: float = 0.0) -> None:
        """Wait until an engine holds no more than ``before``."""
        await self.until(
            engine,
            "what the check took is not given back; before: "
            + ", ".join(f"{held} {getattr(before, held)}" for held in ("free_blocks", *HOLDINGS)),
            lambda now: (
                now.free_blocks >= before.free_blocks
                and all(getattr(now, held) <= getattr(before, held) for held in HOLDINGS)
            ),
            within,
        )


async def run_checks(
    url: str,
    peer: str | None,
    secret: str,
    patience: float,
    only: Collection[str] = (),
    note: Callable[[CheckResult], object] = lambda _: None,
) -> list[CheckResult]:
    """Make all checks of the engine at ``url``, or ``only`` those named, one after the other."""
    names = [check.name for check in CHECKS]
    if unknown := [name for name in only if name not in names]:
        raise BadRequest(f"--only: there is no check {unknown[0]!r}; {near(unknown[0], names)}", "--only")
    results: list[CheckResult] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout()) as s:
        engines = [EngineUnderTest(each, secret, s, patience) for each in (url, peer) if each is not None]
        for each in CHECKS:
            if not only or each.name in only or each is CHECKS[0]:
                lost = bool(results) and results[0].state == "failed"
                results.append(await _result(each, engines, NEEDS_STATUS if lost else ""))
                note(results[-1])
    return results


async def _result(check: VerbCheck, engines: Sequence[EngineUnderTest], hindered: str) -> CheckResult:
    began, state, what, sent, came = time.monotonic(), "passed", "", "", ""
    try:
        if hindered or (check.needs_peer and len(engines) == 1):
            raise Skip(hindered or NEEDS_PEER)
        before = [await each.status() for each in engines]
        trial = EngineTrial(check.name, engines[0], engines[1] if len(engines) > 1 else None, before[0])
        try:
            await check.run(trial)
            for engine, status in zip(engines, before, strict=True):
                await trial.until_given_back(engine, status)
        except BrokenPromise:
            await trial.abort_all()
            raise
    except Skip as skip:
        state, what = "skipped", str(skip)
    except BrokenPromise as broken:
        state, what, sent, came = "failed", broken.what, broken.sent, broken.came
    return CheckResult(
        check=check.name, state=state, promise=check.promise, seconds=round(time.monotonic() - began, 3), what=what,
        sent=sent, came=came, remedy=check.remedy if state == "failed" else "",
    )  # fmt: skip
