"""Calls of an engine under test, as a router makes them; each answer knows its call, for the report of a failure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec

from tercet.protocol import EngineStatus, Output, Sent, TercetError, Usage, from_wire
from tercet.protocol.access import Prover
from tercet.protocol.json_text import UNREADABLE
from tercet.protocol.sse import EVENTS, read_events
from tercet.protocol.wire import API_PREFIX, JSON, PrepRecvAnswer, ReleaseAnswer
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
        """Call ``release``."""
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
        told = " ".join(f"{name}: {value}" for name, value in headers.items() if name != "authorization")
        sent = f"{method} {self.url}{API_PREFIX}/{verb} {told} {shown(data or b'')}".replace("  ", " ").rstrip()
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
