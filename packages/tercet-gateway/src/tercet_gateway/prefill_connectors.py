"""The work before the decode engine's request: a prompt's KV is sent to it, and the request's body is prepared.

A call is split by a connector: Tercet's verbs, or the fields that vLLM's NixlConnector reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

import aiohttp
import msgspec

from tercet.aio.tasks import TaskSet
from tercet.protocol import BadRequest, EngineError, EngineUnreachable, Request, Reservation, TercetError
from tercet.protocol.headers import CHAT, COMPLETIONS, PREFILLED_HEADER, RESPONSES
from tercet.protocol.spans import TraceEvent, VerbTrace
from tercet.protocol.wire import UNREADABLE
from tercet.settings.declaration import FixedPort
from tercet.wire.client import HttpEngine, remote_prefill
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of
from tercet.wire.client.http_engine import QUICK
from tercet.wire.client.remote_prefill import REMOTE, PrefillAttempts, RemotePrefill, prefill_here

SPLIT_PATHS = frozenset({CHAT, COMPLETIONS, RESPONSES})
KV_PARAMS = "kv_transfer_params"
# The fields of a chat request that vLLM's /tokenize accepts: those of which the prompt is made.
OF_THE_PROMPT = (
    "model", "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip
# The fields that the prefill request, with its one unused token, must not have.
OF_THE_ANSWER = (
    "stream_options", "min_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo",
    "suffix", "n", "best_of", "stop", "stop_token_ids", "include", "store", "request_id",
)  # fmt: skip
LIMITS: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"max_tokens": 1},
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
}
TEXTS = ("text", "input_text", "output_text")  # not a set: a client may send any type, lists too


@dataclass(frozen=True)
class SplitCall:
    """One OpenAI request that may be split: its ``body``, its ``fields``, and its client's headers for engines.

    ``request_id`` is its name in logs, which clients choose; ``seq_id`` is its unique id on engines.
    """

    path: str
    body: bytes
    fields: Mapping[str, Any]
    headers: Mapping[str, str]
    request_id: str
    seq_id: str

    def require_whole(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a request that only one engine as a whole can serve."""
        fields = self.fields
        prompt = fields.get("prompt")
        reasons = {
            "several prompts": isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt),
            "beam search": bool(fields.get("use_beam_search")),
            "log probabilities of the prompt": fields.get("prompt_logprobs") is not None,
            "echo": bool(fields.get("echo")),
            "prompt embeddings": fields.get("prompt_embeds") is not None,
            "a continuation of an answer that the engine keeps": fields.get("previous_response_id") is not None,
            "a response in the background": bool(fields.get("background")),
        }
        for what, holds in reasons.items():
            if holds:
                raise BadRequest(f"{what}: cannot be prefilled elsewhere")

    def text(self, name: str) -> str | None:
        """Return the text of the field ``name``; None without it.

        Raises :class:`~tercet.protocol.BadRequest` for another type: the engine explains it to its client.
        """
        found = self.fields.get(name)
        if found is None or isinstance(found, str):
            return found
        raise BadRequest(f"{name}: is not text, and cannot be prefilled elsewhere", name)

    def prefill_body(self) -> bytes:
        """Return the body of the prefill request: the same request, for one token and without a stream."""
        fields = {name: value for name, value in self.fields.items() if name not in OF_THE_ANSWER}
        keep = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        return msgspec.json.encode({**fields, **LIMITS[self.path], "stream": False, KV_PARAMS: keep})

    def to_tokenize(self) -> Mapping[str, Any]:
        """Return the body of the request to vLLM's ``/tokenize`` for the prompt's tokens.

        Raises :class:`~tercet.protocol.BadRequest` for a prompt that is more than text.
        """
        fields = self.fields
        if self.path == COMPLETIONS:
            return {name: fields[name] for name in ("model", "prompt", "add_special_tokens") if name in fields}
        if self.path == RESPONSES:
            fields = {"model": fields.get("model"), "messages": messages_of(fields)}
            if "chat_template_kwargs" in self.fields:
                fields["chat_template_kwargs"] = self.fields["chat_template_kwargs"]
        _require_text(fields.get("messages"))
        return {name: fields[name] for name in OF_THE_PROMPT if name in fields}


def messages_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that vLLM makes from a request to ``/v1/responses``.

    Raises :class:`~tercet.protocol.BadRequest` unless the input consists of text messages only.
    """
    for name in ("tools", "reasoning", "prompt"):
        if fields.get(name):
            raise BadRequest(f"{name}: responses with it cannot be prefilled elsewhere", name)
    given: Any = fields.get("input")
    if not isinstance(given, (str, list)):
        raise BadRequest("input: must be a string or a list", "input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else cast("list[Any]", given)
    instructions = fields.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, *(_message(item) for item in items)]


def _message(item: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    content = fields.get("content")
    if fields.get("type", "message") != "message" or "role" not in fields:
        raise BadRequest("input: items other than messages cannot be prefilled elsewhere", "input")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        _require_text([{"content": parts}])
        if fields["role"] == "assistant":  # vLLM uses only the first part
            content = _text(parts[0]) if parts else ""
        else:
            content = [{"type": "text", "text": _text(part)} for part in parts]
    return {"role": fields["role"], "content": content}


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, dict) else part  # pyright: ignore


def _require_text(messages: Any) -> None:
    for message in messages if isinstance(messages, list) else ():  # pyright: ignore[reportUnknownVariableType]
        content: Any = message.get("content") if isinstance(message, dict) else None  # pyright: ignore
        if isinstance(content, list) and any(_kind(part) not in TEXTS for part in content):  # pyright: ignore
            raise BadRequest("messages: content that is not text cannot be prefilled elsewhere", "messages")


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else "text"  # pyright: ignore


logger = logging.getLogger("tercet.gateway")
T = TypeVar("T")
PREFILL = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
DRAIN = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
_COMMIT_TRIES = 50


class PrefillConnector(Protocol):
    """A way to have the KV of a request's prompt sent to the decode engine."""

    def prefilled(
        self, call: SplitCall, hosts: Sequence[str], trace: VerbTrace
    ) -> AbstractAsyncContextManager[DecodeRequest]:
        """Provide the decode engine's request; it uses KV that other engines have computed, if one could."""
        ...

    async def look(self) -> None:
        """Raise :class:`~tercet.protocol.TercetError` if the decode engine is not healthy."""
        ...

    async def finish(self, seconds: float) -> None:
        """Wait for the background work to end, at most ``seconds``."""
        ...


async def _alone(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await work()


class WhileThere(Protocol):
    """A runner of work that needs another engine.

    It raises :class:`~tercet.protocol.EngineUnreachable` if that engine is lost.
    """

    async def __call__(self, work: Callable[[], Coroutine[Any, Any, T]], /) -> T: ...


@dataclass
class DecodeRequest:
    """The decode engine's request; ``local`` is the body to use if the first one fails, None if it is the same.

    ``headers`` are added to the client's headers.

    The sender sets ``sent``, after which the engine releases the KV to which ``body`` refers, and ``failure``, the
    reason for using ``local``. Until the engine answers ``body``, send it inside ``while_there``: an engine may wait
    for ever for KV of another engine that has died.
    """

    body: bytes
    local: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    while_there: WhileThere = _alone
    sent: bool = False
    failure: TercetError | None = None


class _Known:
    """The decode engine as a receiver; it keeps its reservation."""

    def __init__(self, engine: HttpEngine) -> None:
        self.name = engine.name
        self.reservation: Reservation | None = None
        self._engine = engine

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        async with self._engine.prep_recv(request, end) as self.reservation:
            yield self.reservation


class TercetPrefill:
    """KV goes by the verbs: it is pushed to the decode engine, and is in its prefix cache before the request."""

    def __init__(
        self, engine: HttpEngine, session: aiohttp.ClientSession, remote: RemotePrefill, stuck_s: float
    ) -> None:
        self._engine = engine
        self._session = session
        self._remote = remote
        self._stuck_s = stuck_s

    @asynccontextmanager
    async def prefilled(self, call: SplitCall, hosts: Sequence[str], trace: VerbTrace) -> AsyncGenerator[DecodeRequest]:
        try:
            call.require_whole()
            model, salt = call.text("model"), call.text("cache_salt")
            status = await self._engine.status()
            if model in {adapter.name for adapter in status.adapters}:  # its KV differs from the base model's
                raise BadRequest("a prompt with a LoRA adapter cannot be prefilled elsewhere", "model")
            request = Request(seq_id=call.seq_id, prompt=await self._tokens(call), cache_salt=salt)
        except TercetError as error:
            prefill_here(self._engine.name, call.request_id, error, trace)
            yield DecodeRequest(call.body)
            return
        decode = _Known(self._engine)
        async with self._remote.prefilled(decode, request, hosts, trace) as begin:
            headers = dict[str, str]()
            sent = trace.filled()
            if decode.reservation is not None and sent is not None and begin > decode.reservation.matched_len:
                try:
                    async with asyncio.timeout(self._stuck_s):
                        await self._committed(request, decode.reservation, begin)
                except (TercetError, TimeoutError) as error:
                    said = "%s did not commit the received KV of %s to its prefix cache: %r"
                    logger.warning(said, self._engine.name, call.request_id, error)
                headers[PREFILLED_HEADER] = f"{decode.reservation.lease} {sent.cached}"
            yield DecodeRequest(call.body, headers=headers)

    async def look(self) -> None:
        status = await self._engine.status()
        if status.stalled_s > self._stuck_s:
            raise EngineUnreachable(f"{self._engine.name} has made no progress for {status.stalled_s:.1f} s")

    async def finish(self, seconds: float) -> None:
        """Return at once: there is no background work."""

    async def _committed(self, request: Request, reservation: Reservation, end: int) -> None:
        """Wait until the engine has committed the received KV, with a limit of tries; missing KV is recomputed."""
        status = await self._engine.status()
        whole = end // status.block_size * status.block_size
        for _ in range(_COMMIT_TRIES):
            extended = await self._engine.extend_recv(reservation, request, -1)
            if extended.matched_len >= whole:
                return

    async def _tokens(self, call: SplitCall) -> tuple[int, ...]:
        """Return the prompt's tokens, as the decode engine makes them. Raises :class:`~tercet.protocol.TercetError`."""
        fields = call.fields
        if call.path == COMPLETIONS and isinstance(fields.get("prompt"), list):
            return tuple(fields["prompt"])
        body = msgspec.json.encode(call.to_tokenize())
        url = f"{self._engine.url}/tokenize"
        answer = await _posted(self._session, url, body, call.headers, QUICK, _Tokens, self._engine.name)
        return answer.tokens


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]


# ---- vLLM's own protocol -------------------------------------------------------------------------------------


class KVTransferParams(msgspec.Struct):
    """The parameters by which another engine fetches KV, in the answer of the engine that has prefilled.

    The answer may have more parameters.
    """

    do_remote_prefill: Literal[True]
    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1)]
    remote_block_ids: list[Any]
    remote_host: Annotated[str, msgspec.Meta(min_length=1)]
    remote_port: FixedPort


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class NixlPrefill:
    """KV goes by vLLM's protocol in two steps: the first engine keeps the KV until the second one has fetched it.

    If the client leaves before that, the KV is fetched for one unused token: otherwise it would stay pinned on the
    first engine until its timeout.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, attempts: PrefillAttempts, https: bool) -> None:
        self._url = url
        self._session = session
        self._attempts = attempts
        self._scheme = "https" if https else "http"
        self.draining = TaskSet()

    @asynccontextmanager
    async def prefilled(self, call: SplitCall, hosts: Sequence[str], trace: VerbTrace) -> AsyncGenerator[DecodeRequest]:
        trace.program = REMOTE
        began = self._attempts.clock()
        found: tuple[str, dict[str, Any]] | None = None
        try:
            call.require_whole()
            ask = partial(self._prefilled_by, call, trace)
            found = await self._attempts.first_of(hosts, call.request_id, trace, ask)
        except TercetError as error:
            prefill_here(self._url, call.request_id, error, trace)
        remote_prefill.seconds.observe(self._attempts.clock() - began)
        if found is None:
            yield DecodeRequest(call.body)
            return
        host, params = found
        body = msgspec.json.encode({**call.fields, KV_PARAMS: params})
        prepared = DecodeRequest(body, local=call.body, while_there=partial(self._while_there, host))
        try:
            yield prepared
        finally:
            if not prepared.sent:
                self.draining.spawn(self._drain(call, params), "draining")
            elif prepared.failure is not None:
                prefill_here(self._url, call.request_id, prepared.failure, trace)
            else:
                remote_prefill.prefills.labels(remote_prefill.PULLED, "").inc()

    async def look(self) -> None:
        await self._healthy(self._url)

    async def finish(self, seconds: float) -> None:
        await self.draining.wait(seconds)

    async def _while_there(self, host: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def outcome() -> T | TercetError:
            try:
                return await work()
            except TercetError as error:  # an error of the decode engine, not of the prefill engine
                return error

        found = await self._attempts.watched(host, outcome, partial(self._healthy, f"{self._scheme}://{host}"))
        if isinstance(found, TercetError):
            raise found
        return found

    async def _prefilled_by(self, call: SplitCall, trace: VerbTrace, host: str) -> tuple[str, dict[str, Any]]:
        url = f"{self._scheme}://{host}"
        started = time.monotonic()

        async def prefill() -> dict[str, Any]:
            body = call.prefill_body()
            answer = await _posted(self._session, url + call.path, body, call.headers, PREFILL, _Prefilled, host)
            return checked_params(answer.kv_transfer_params, host)

        params = await self._attempts.watched(host, prefill, partial(self._healthy, url))
        trace.events.append(TraceEvent("prefill", host, time.monotonic() - started, to=self._url))
        return host, params

    async def _healthy(self, url: str) -> None:
        try:
            async with self._session.get(f"{url}/health", timeout=QUICK, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise EngineUnreachable(f"{url} is not healthy: /health answers {answer.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"{url} does not answer: {reason_of(error)}") from error

    async def _drain(self, call: SplitCall, params: dict[str, Any]) -> None:
        body = msgspec.json.encode({**msgspec.json.decode(call.prefill_body(), type=dict[str, Any]), KV_PARAMS: params})
        try:
            await _posted(self._session, self._url + call.path, body, call.headers, DRAIN, _Prefilled, self._url)
        except TercetError:
            return  # then the timeout on the engine that has the KV frees it


def checked_params(params: dict[str, Any] | None, host: str) -> dict[str, Any]:
    """Return the parameters of an engine's answer unchanged.

    Raises :class:`~tercet.protocol.EngineError` if another engine could not use them.
    """
    if params is None:
        raise EngineError(f"{host}: its answer has no kv_transfer_params; start it with a connector such as NIXL's")
    try:
        msgspec.convert(params, KVTransferParams)
    except msgspec.ValidationError as error:
        raise EngineError(f"{host}: its kv_transfer_params cannot be used: {error}") from error
    return params


async def _posted(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout: aiohttp.ClientTimeout,
    kind: type[Any],
    name: str,
) -> Any:
    """Return the JSON answer of ``name``. Raises :class:`~tercet.protocol.TercetError`."""
    shown = {**headers, "content-type": "application/json", **PLAIN}
    try:
        async with session.post(url, data=body, headers=shown, timeout=timeout, allow_redirects=False) as answer:
            status, said = answer.status, await read_answer(answer)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnreachable(f"{name} does not answer: {reason_of(error)}") from error
    if status != 200:
        raise EngineError(f"{name} refuses with HTTP {status}: {said[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(said, type=kind)
    except UNREADABLE as error:
        raise EngineError(f"{name}: its answer cannot be used: {error}") from error
