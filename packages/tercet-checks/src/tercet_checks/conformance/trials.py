"""The run of a suite, and the calls to engines under test as any HTTP client makes them.

Each check has its own names and prompts, and afterwards the engines hold nothing for it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec

from tercet.protocol import BadRequest, EngineStatus, Output, Sent, TercetError, Usage, from_wire
from tercet.protocol.json_text import UNREADABLE
from tercet.protocol.sse import EVENTS, read_events
from tercet.protocol.wire import API_PREFIX, JSON, PrepRecvAnswer, ReleaseAnswer
from tercet.settings.declaration import near
from tercet.wire.callers import Prover
from tercet.wire.client.bounded_answers import proved

T = TypeVar("T")
Call = Mapping[str, Any]
SHOWN_CHARACTERS = 700
_TOKENS = re.compile(r"\[((?:\d+,){8})[\d,]*,(\d+)\]")


class BrokenPromise(Exception):
    """The engine did not keep what a check is about: ``what`` was wrong, ``sent`` and ``came`` of the call."""

    def __init__(self, what: str, sent: str = "", came: str = "") -> None:
        super().__init__(what)
        self.what, self.sent, self.came = what, sent, came


def shown(body: bytes | str) -> str:
    """Return a body for a report: long lists of tokens and long bodies are cut."""
    text = body if isinstance(body, str) else body.decode(errors="backslashreplace")
    text = _TOKENS.sub(lambda found: f"[{found[1]}... {found[0].count(',') + 1} tokens]", text)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def reserving(call: Call, **fields: Any) -> Call:
    """Return the body of ``prep_recv``, which knows no sampling."""
    return {**{name: value for name, value in call.items() if name != "sampling_params"}, **fields}


class VerbAnswer(msgspec.Struct, frozen=True):
    """An answer of an engine, and the call that it answers, as text."""

    sent: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def came(self) -> str:
        return f"{self.status} {shown(self.body)}"

    def require(self, holds: object, what: str) -> None:
        """Raise :class:`BrokenPromise` with this call and answer unless a condition holds."""
        if not holds:
            raise BrokenPromise(what, self.sent, self.came)

    def decoded(self, kind: type[T]) -> T:
        """Return the answer as ``kind``, read as strictly as a router reads it."""
        self.require(self.status == HTTPStatus.OK, f"the status is {self.status}, and must be 200")
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE as error:
            raise BrokenPromise(f"the answer is not the verb's: {error}", self.sent, self.came) from error

    def refused(self, statuses: int | Collection[int], code: str = "", param: str = "") -> None:
        """Require an error of the protocol with one of these statuses, and with ``code`` and ``param`` if given.

        A ``param`` may also name a part of the field.
        """
        allowed = {statuses} if isinstance(statuses, int) else set(statuses)
        wanted = " or ".join(map(str, sorted(allowed)))
        self.require(self.status in allowed, f"the status is {self.status}, and must be {wanted}")
        try:
            error = msgspec.json.decode(self.body, type=dict[str, dict[str, str | None]])["error"]
        except (*UNREADABLE, KeyError) as problem:
            form = '{"error": {"message", "type", "param", "code"}}'
            raise BrokenPromise(f"the error is not of the form {form}: {problem}", self.sent, self.came) from problem
        for field in ("message", "type", "code"):
            self.require(error.get(field), f"the error has no {field}")
        self.require("param" in error, "the error has no param; it is null if no field is wrong")
        self.require(not code or error["code"] == code, f"the code is {error['code']!r}, and must be {code!r}")
        named = error["param"] or ""
        self.require(named.startswith(param), f"param is {error['param']!r}, and must be {param!r}")


class LiveGeneration:
    """A stream of ``start_generate`` that is being read. It has ended properly after :meth:`rest`."""

    def __init__(self, sent: str, response: aiohttp.ClientResponse, patience: float) -> None:
        self.outputs: list[Output] = []
        self.error: TercetError | None = None
        self._sent = sent
        self._patience = patience
        self._events = read_events(response.content.iter_any())
        kind = response.headers.get("content-type", "").partition(";")[0].strip()
        self.require(kind == EVENTS, f"the content-type is {kind!r}, and must be {EVENTS}")

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def usage(self) -> Usage:
        """What the engine did for the prompt; it comes with the first output."""
        found = self.outputs[0].usage if self.outputs else None
        if found is None:
            raise BrokenPromise("the first output has no usage", self._sent, self.came)
        return found

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def came(self) -> str:
        read = [shown(msgspec.json.encode(each)) for each in self.outputs[:3] + self.outputs[3:][-2:]]
        return f"{len(self.outputs)} outputs: {' '.join(read)}{f' error: {self.error.message}' if self.error else ''}"

    def require(self, holds: object, what: str) -> None:
        """Raise :class:`BrokenPromise` with this stream unless a condition holds."""
        if not holds:
            raise BrokenPromise(what, self._sent, self.came)

    async def take(self, tokens: int) -> None:
        """Read until there are at least this many tokens, or the stream ends."""
        while len(self.tokens) < tokens and await self._read():
            pass

    async def rest(self) -> LiveGeneration:
        """Read to the end, which must be one output with a finish reason, or one error."""
        while await self._read():
            pass
        ended = [output for output in self.outputs if output.finish_reason is not None]
        self.require(self.error or ended, "the stream ended without a finish_reason")
        self.require(len(ended) <= 1, f"{len(ended)} outputs have a finish_reason")
        self.require(self.error or self.outputs[-1] is ended[0], "outputs came after the one with a finish_reason")
        return self

    async def _read(self) -> bool:
        try:
            async with asyncio.timeout(self._patience):
                data = await anext(self._events, None)
            if data is None:
                return False
            if data.startswith(b'{"error"'):
                self.error = from_wire(500, msgspec.json.decode(data, type=dict[str, Any]))
            else:
                self.outputs.append(msgspec.json.decode(data, type=Output))
        except TimeoutError:
            raise BrokenPromise(f"nothing came for {self._patience:g} s", self._sent, self.came) from None
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenPromise(f"the connection broke: {error}", self._sent, self.came) from error
        except UNREADABLE as error:
            raise BrokenPromise(f"an event is not an output: {error}", self._sent, self.came) from error
        return True


class EngineUnderTest:
    """The engine at ``url``. Calls prove ``secret``; one that takes longer than ``patience`` seconds is a failure."""

    def __init__(self, url: str, secret: str, session: aiohttp.ClientSession, patience: float) -> None:
        self.url = url.rstrip("/")
        self.secret = secret
        self.patience = patience
        self._session = session
        self._prover = Prover(secret)

    async def call(
        self, verb: str, body: Call | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> VerbAnswer:
        """Make a call: POST with a body, else GET. The secret is proved unless ``headers`` say what to show instead."""
        async with self._exchange(verb, body, headers or {}) as (sent, response):
            try:
                async with asyncio.timeout(self.patience):
                    whole = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise BrokenPromise(f"the answer broke off: {error!r}", sent, f"{response.status}") from error
            return VerbAnswer(sent, response.status, response.headers, whole)

    @asynccontextmanager
    async def generating(self, call: Call, **fields: Any) -> AsyncGenerator[LiveGeneration]:
        """Yield the stream of ``start_generate``. Leaving the context closes it."""
        async with self._exchange("start_generate", {**call, **fields}, {}) as (sent, response):
            if response.status != HTTPStatus.OK:
                came = f"{response.status} {shown(await response.read())}"
                raise BrokenPromise(f"the status is {response.status}, and must be 200", sent, came)
            yield LiveGeneration(sent, response, self.patience)

    async def generate(self, call: Call, **fields: Any) -> LiveGeneration:
        """Generate to the end; the stream must end with a finish reason."""
        async with self.generating(call, **fields) as stream:
            await stream.rest()
            stream.require(stream.error is None, "the stream ended with an error")
            return stream

    async def reserve(self, call: Call, **fields: Any) -> PrepRecvAnswer:
        """Call ``prep_recv``, which must succeed."""
        return (await self.call("prep_recv", reserving(call, **fields))).decoded(PrepRecvAnswer)

    async def send(
        self, call: Call, to: PrepRecvAnswer, begin: int, end: int | None = None, **fields: Any
    ) -> VerbAnswer:
        """Call ``remote_send`` into a reservation, by default up to its end."""
        info: dict[str, Any] = msgspec.to_builtins(to.kv_addr_info)
        end = to.kv_addr_info.end if end is None else end
        return await self.call("remote_send", {**call, "kv_addr_info": info, "begin": begin, "end": end, **fields})

    async def sent(self, call: Call, to: PrepRecvAnswer, begin: int, end: int | None = None, **fields: Any) -> Sent:
        """Call ``remote_send`` as :meth:`send` does; it must succeed."""
        return (await self.send(call, to, begin, end, **fields)).decoded(Sent)

    async def release(self, reserved: PrepRecvAnswer) -> VerbAnswer:
        return await self.call("release", {"lease": reserved.kv_addr_info.lease})

    async def released(self, reserved: PrepRecvAnswer) -> int:
        """Call ``release``, which must succeed; return the end of the valid KV."""
        return (await self.release(reserved)).decoded(ReleaseAnswer).valid_end

    async def aborted(self, call: Call, was_there: bool) -> None:
        """Call ``abort``, which must say whether there was work for the sequence."""
        answer = await self.call("abort", {"seq_id": call["seq_id"]})
        found = answer.decoded(dict[str, bool]).get("aborted")
        answer.require(found is was_there, f"aborted is {found}, and must be {was_there}")

    async def status(self) -> EngineStatus:
        """Call ``status``, which must succeed."""
        return (await self.call("status")).decoded(EngineStatus)

    @asynccontextmanager
    async def _exchange(
        self, verb: str, body: Call | bytes | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[str, aiohttp.ClientResponse]]:
        method = "GET" if body is None else "POST"
        data = None if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        listed = " ".join(f"{name}: {value}" for name, value in headers.items() if name != "authorization")
        sent = f"{method} {self.url}{API_PREFIX}/{verb} {listed} {shown(data or b'')}".replace("  ", " ").rstrip()
        given = {"accept-encoding": "identity", "content-type": JSON, **headers}
        if body is None:
            del given["content-type"]
        try:
            async with asyncio.timeout(self.patience):
                response = await self._ask(method, verb, data, given)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"no answer within {self.patience:g} s" if isinstance(error, TimeoutError) else f"no answer: {error}"
            raise BrokenPromise(what, sent) from error
        try:
            yield sent, response
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def _ask(self, method: str, verb: str, data: bytes | None, headers: dict[str, str]) -> aiohttp.ClientResponse:
        url, proves = f"{self.url}{API_PREFIX}/{verb}", "authorization" not in headers
        headers = {name: value for name, value in headers.items() if value}

        async def ask(proof: dict[str, str]) -> aiohttp.ClientResponse:
            shown = {**headers, **proof}
            return await self._session.request(method, url, data=data, headers=shown, allow_redirects=False)

        return await proved(self._prover, method, f"/{verb}", data, ask) if proves else await ask({})


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
