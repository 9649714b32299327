"""A small OpenAI API over the service, for simulated fleets: text completions and chats, without vLLM and torch.

A request has one prompt and gets one answer. Other features (several answers, tools, log probabilities, images,
structured output) are refused with the field's name; vLLM's layer supports them (``--openai-layer vllm``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import StreamingResponse

from tercet import __version__
from tercet.protocol import BadRequest, Output, TercetError, UnknownModel
from tercet.protocol import Request as ProgramRequest
from tercet.protocol.error_forms import error_body
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.wire import TokenId, decode_call
from tercet.router.prompt_texts import ChatMessage, PromptTexts
from tercet.router.service_programs import ServicePrograms, TracedRun
from tercet.wire.serving.error_answers import error_headers
from tercet.wire.serving.request_context import RequestContext, current

DEFAULT_MAX_TOKENS = 16
"""Default of OpenAI's completions API."""
CHAT_MAX_TOKENS = 256
"""Default for chats: a simulated model ends each answer only at its limit."""
DONE = b"data: [DONE]\n\n"
JSON = "application/json"
# Fields that would change the answer, and the values without effect, which are accepted.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "response_format": (),
    "structured_outputs": (), "guided_json": (), "stop": ("", []), "stop_token_ids": ([],), "prompt_embeds": (),
    "logit_bias": ({},),
}  # fmt: skip


class UsageOptions(msgspec.Struct, frozen=True):
    """Options of a stream: with ``include_usage``, a last chunk has the numbers of tokens."""

    include_usage: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of completions and chats. Other fields that a simulated model ignores (temperature, ...) are allowed."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: UsageOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None


class TextCompletionCall(Call, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[TokenId]


class ChatCall(Call, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


class TextCall(msgspec.Struct, frozen=True):
    """Body of ``POST /tokenize``."""

    prompt: str


def small_app(programs: ServicePrograms, texts: PromptTexts, names: list[str], max_model_len: int) -> FastAPI:
    """Return the application for a model with these ``names`` and at most ``max_model_len`` tokens per sequence."""
    app = FastAPI(title="Tercet", version=__version__)
    api = SmallAPI(programs, texts, names, max_model_len)
    routes = (
        ("POST", "/v1/completions", api.completions), ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/tokenize", api.tokenize), ("GET", "/v1/models", api.models), ("GET", "/version", api.version),
        ("GET", "/health", api.health), ("GET", "/ping", api.health),
        ("GET", "/metrics", api.metrics), ("GET", "/metrics/", api.metrics),
    )  # fmt: skip
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(TercetError, _refused)
    return app


async def _refused(http: Request, error: Exception) -> Response:
    if not isinstance(error, TercetError):
        raise error
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(http.url.path, error), error.status, headers)


class SmallAPI:
    """The handlers of the routes."""

    def __init__(self, programs: ServicePrograms, texts: PromptTexts, names: list[str], max_model_len: int) -> None:
        self._programs = programs
        self._texts = texts
        self._names = names
        self._max_model_len = max_model_len

    async def completions(self, http: Request) -> Response:
        """Serve ``POST /v1/completions``."""
        call = await _read(http, TextCompletionCall)
        prompt = await asyncio.to_thread(self._encode, call.prompt) if isinstance(call.prompt, str) else call.prompt
        most = DEFAULT_MAX_TOKENS if call.max_tokens is None else call.max_tokens
        return await self._answer(call, prompt, most, Form("cmpl", "text_completion", chat=False))

    async def chat(self, http: Request) -> Response:
        """Serve ``POST /v1/chat/completions``."""
        call = await _read(http, ChatCall)
        prompt = await asyncio.to_thread(lambda: self._encode(self._texts.chat(call.messages)))
        wanted = call.max_tokens if call.max_completion_tokens is None else call.max_completion_tokens
        most = min(CHAT_MAX_TOKENS, max(1, self._max_model_len - len(prompt))) if wanted is None else wanted
        return await self._answer(call, prompt, most, Form("chatcmpl", "chat.completion", chat=True))

    async def tokenize(self, http: Request) -> Response:
        """Serve ``POST /tokenize``."""
        call = await _read(http, TextCall)
        tokens = await asyncio.to_thread(self._encode, call.prompt)
        return _json({"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens})

    async def models(self) -> Response:
        """Serve ``GET /v1/models``."""
        entry = {"object": "model", "owned_by": "tercet", "max_model_len": self._max_model_len}
        return _json({"object": "list", "data": [{"id": name, **entry} for name in self._names]})

    async def version(self) -> Response:
        """Serve ``GET /version``."""
        return _json({"version": f"tercet {__version__}, without vLLM"})

    async def health(self) -> Response:
        """Serve ``GET /health``; the router has checked its engines before."""
        return Response()

    async def metrics(self) -> Response:
        """Serve ``GET /metrics``."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    def _encode(self, text: str) -> list[int]:
        return self._texts.encode(text)

    async def _answer(self, call: Call, prompt: list[int], max_tokens: int, form: Form) -> Response:
        if call.model not in (None, *self._names):
            raise UnknownModel(f"model: this router does not serve {call.model!r}; use {self._names[0]}", "model")
        if not prompt:
            raise BadRequest("prompt: is empty; send at least one token", "prompt")
        if max_tokens < 1:
            raise BadRequest(f"max_tokens: is {max_tokens}, and must be at least 1", "max_tokens")
        if len(prompt) + max_tokens > self._max_model_len:
            raise BadRequest(
                f"max_tokens: {len(prompt)} tokens of the prompt and {max_tokens} output tokens exceed the model's "
                f"context length of {self._max_model_len}",
                "max_tokens",
            )
        context = current()
        name = f"{form.prefix}-{context.headers.get('x-request-id') or uuid.uuid4().hex}"
        request = ProgramRequest(
            seq_id=name, prompt=tuple(prompt), sampling_params={"max_tokens": max_tokens}, priority=call.priority,
            cache_salt=call.cache_salt, headers=context.headers, user=call.user,
        )  # fmt: skip
        answer = Answering(self._programs, self._texts, request, form, call.model or self._names[0], context)
        if call.stream:
            usage = call.stream_options is not None and call.stream_options.include_usage
            return await answer.streamed(usage)
        return await answer.whole()


class Form(msgspec.Struct, frozen=True):
    """The shape of an API's answers."""

    prefix: str
    kind: str
    chat: bool

    def choice(self, text: str, finish_reason: str | None, streamed: bool) -> dict[str, Any]:
        """Return the only choice of an answer, or of a chunk of it."""
        end = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if not self.chat:
            return {"text": text, **end}
        return {"delta" if streamed else "message": {"role": "assistant", "content": text}, **end}


class Answering:
    """One answer while it is generated."""

    def __init__(
        self, programs: ServicePrograms, texts: PromptTexts, request: ProgramRequest, form: Form, model: str,
        context: RequestContext,
    ) -> None:  # fmt: skip
        self._programs = programs
        self._texts = texts
        self._request = request
        self._form = form
        self._run: TracedRun = programs.run(request, context)
        self._context = context
        self._head = {"id": request.seq_id, "created": int(time.time()), "model": model}

    async def whole(self) -> Response:
        """Return the whole answer after the last token."""
        tokens, reason = list[int](), None
        async for output in self._outputs():
            tokens += output.token_ids
            reason = output.finish_reason or reason
        choice = self._form.choice(self._texts.decode(tokens), reason, streamed=False)
        return _json({**self._head, "object": self._form.kind, "choices": [choice], "usage": self._usage(len(tokens))})

    async def streamed(self, include_usage: bool) -> Response:
        """Return a stream of server-sent events, after the first output, so that invalid input gets a 4xx status."""
        outputs = self._outputs()
        first = await anext(outputs, None)
        events = self._events(first, outputs, include_usage)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _outputs(self) -> AsyncIterator[Output]:
        """Yield the outputs; count, log and raise an error that ends the sequence."""
        try:
            async with aclosing(self._run.stream) as stream:
                async for output in stream:
                    yield output
        except TercetError as error:
            self._programs.failed(self._request.seq_id, error)
            self._context.failed = error
            raise

    async def _events(
        self, output: Output | None, rest: AsyncIterator[Output], include_usage: bool
    ) -> AsyncIterator[bytes]:
        tokens, shown = list[int](), 0
        try:
            while output is not None:
                tokens += output.token_ids
                text = self._texts.decode(tokens[shown:])
                whole = output.finish_reason is not None or not text.endswith("\ufffd")
                if whole:  # otherwise the last bytes of a character are still missing
                    shown = len(tokens)
                    yield self._chunk([self._form.choice(text, output.finish_reason, streamed=True)])
                output = await anext(rest, None)
            if include_usage:
                yield self._chunk([], usage=self._usage(len(tokens)))
        except TercetError as error:
            yield b"data: " + error_body(self._context.path, error) + b"\n\n"
        yield DONE

    def _chunk(self, choices: list[Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._form.chat else self._form.kind
        chunk = {**self._head, "object": kind, "choices": choices, **more}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = self._request.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


async def _read(http: Request, kind: type[Any]) -> Any:
    """Return the decoded body; raise :class:`~tercet.protocol.BadRequest` for features that are not supported."""
    body = await http.body()
    call = decode_call(body, kind)
    for name, value in read_json(in_utf8(body)).items():
        if name in NOT_SERVED and value is not None and not _asks_for_nothing(value, NOT_SERVED[name]):
            raise BadRequest(
                f"{name}: the small OpenAI layer of simulated fleets does not support it; use --openai-layer vllm", name
            )
    return call


def _asks_for_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def prompt_texts(checkpoint: str) -> PromptTexts:
    """Return the tokenizer and chat template in a checkpoint's folder.

    Raises :class:`~tercet.protocol.BadRequest` without a valid tokenizer.
    """
    return PromptTexts(Path(checkpoint))
