"""A small OpenAI API over the service, for simulated fleets: text completions and chats, without vLLM and torch.

A request has one prompt and gets one answer. Other features (several answers, tools, log probabilities, images,
structured output) are refused with the field's name; vLLM's layer supports them (``--openai-layer vllm``).
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, cast

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import StreamingResponse

from tercet import __version__
from tercet.aio.tasks import keep_running
from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest, Output, TercetError, UnknownModel
from tercet.protocol import Request as ProgramRequest
from tercet.protocol.access import given_key
from tercet.protocol.errors import error_body
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.json_text import in_utf8, read_json
from tercet.protocol.wire import LEAST_PRIORITY, MOST_PRIORITY
from tercet.router import admin
from tercet.router.admin.admin_server import admin_served
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import put_layers_before
from tercet.router.serve.plans import NamedFiles
from tercet.router.serve.service import RequestRun, Service
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.router.workers import Shared, listening_socket, log_ready
from tercet.settings import RouterConfig
from tercet.wire.serving.answers import error_headers
from tercet.wire.serving.http_server import server_of
from tercet.wire.serving.server_access import RequestContext, RouterKeys, api_keys, current
from tercet_lab.prompt_texts import ChatMessage, PromptTexts

DEFAULT_MAX_TOKENS = 16
"""Default of OpenAI's completions API."""
CHAT_MAX_TOKENS = 256
"""Default for chats: a simulated model ends each answer only at its limit."""
DONE = b"data: [DONE]\n\n"
JSON = "application/json"
VLLM_PRIORITY_HEADER = "x-vllm-priority"
C = TypeVar("C", bound=BaseModel)
# Fields that would change the answer, and the values without effect, which are accepted.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (), "echo": (False,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "response_format": (),
    "structured_outputs": (), "guided_json": (), "stop": ("", []), "stop_token_ids": ([],), "prompt_embeds": (),
    "logit_bias": ({},), "use_beam_search": (False,), "allowed_token_ids": (), "bad_words": ([],),
    "truncate_prompt_tokens": (), "chat_template": (), "documents": ([],), "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,), "mm_processor_kwargs": ({},),
}  # fmt: skip
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Int64 = Annotated[int, Field(ge=LEAST_PRIORITY, le=MOST_PRIORITY)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class UsageOptions(BaseModel):
    """Options of a stream: with ``include_usage``, a last chunk has the numbers of tokens."""

    include_usage: bool | None = False


class Call(BaseModel):
    """Fields of completions and chats, which take the forms that vLLM's layer takes (``"true"``, ``16.0``).

    A simulated model ignores sampling, but wrong values are refused. Other fields are allowed.
    """

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool | None = False
    stream_options: UsageOptions | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(pattern=r"\A[^@/\\\x00]{1,128}\z")] | None = None
    user: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    use_beam_search: bool = False
    ignore_eos: bool = False
    seed: Int64 | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[Share, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Positive | None = None


class TextCompletionCall(Call):
    """Body of ``POST /v1/completions``."""

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    prompt: str | TokenIds


class ChatCall(Call):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Any]
    max_completion_tokens: int | None = None


class TextCall(BaseModel):
    """Body of ``POST /tokenize``."""

    prompt: str


def small_app(service: Service, texts: PromptTexts, names: list[str], max_model_len: int) -> FastAPI:
    """Return the application for a model with these ``names`` and at most ``max_model_len`` tokens per sequence."""
    app = FastAPI(title="Tercet", version=__version__)
    api = SmallAPI(service, texts, names, max_model_len)
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

    def __init__(self, service: Service, texts: PromptTexts, names: list[str], max_model_len: int) -> None:
        self._service = service
        self._texts = texts
        self._names = names
        self._max_model_len = max_model_len

    async def completions(self, http: Request) -> Response:
        """Serve ``POST /v1/completions``."""
        call = await _read(http, TextCompletionCall)
        prompt = call.prompt
        if isinstance(prompt, str):
            prompt = await asyncio.to_thread(self._texts.encode, prompt)
        return await self._answer(call, prompt, call.max_tokens, Form("cmpl", "text_completion", chat=False))

    async def chat(self, http: Request) -> Response:
        """Serve ``POST /v1/chat/completions``."""
        call = await _read(http, ChatCall)
        try:
            messages = msgspec.convert(call.messages, list[ChatMessage])
        except msgspec.ValidationError as error:
            raise BadRequest(f"messages: {error}", "messages") from error
        prompt = await asyncio.to_thread(lambda: self._texts.encode(self._texts.chat(messages)))
        most = call.max_tokens if call.max_completion_tokens is None else call.max_completion_tokens
        return await self._answer(call, prompt, most, Form("chatcmpl", "chat.completion", chat=True))

    async def tokenize(self, http: Request) -> Response:
        """Serve ``POST /tokenize``."""
        call = await _read(http, TextCall)
        tokens = await asyncio.to_thread(self._texts.encode, call.prompt)
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

    async def _answer(self, call: Call, prompt: list[int], most: int | None, form: Form) -> Response:
        """Answer with at most ``most`` tokens, and no more than fit; None: up to the default for chats."""
        if call.model and call.model not in self._names:
            raise UnknownModel(f"model: this router does not serve {call.model!r}; use {self._names[0]}", "model")
        room, length = self._max_model_len - len(prompt), f"the model's context length of {self._max_model_len}"
        if room < 1:
            raise BadRequest(f"prompt: has {len(prompt)} tokens, which fill {length}", "prompt")
        wanted = min(CHAT_MAX_TOKENS, room) if most is None else most
        if not 1 <= wanted <= self._max_model_len:
            raise BadRequest(f"max_tokens: is {wanted}, and must be 1 to {length}", "max_tokens")
        max_tokens = min(wanted, room)
        if call.min_tokens > max_tokens:
            raise BadRequest(f"min_tokens: is {call.min_tokens}, more than max_tokens ({max_tokens})", "min_tokens")
        if call.stream_options is not None and not call.stream:
            raise BadRequest("stream_options: needs `stream: true`", "stream_options")
        context = current()
        name = context.headers.get(REQUEST_ID_HEADER) or call.request_id or uuid.uuid4().hex
        request = ProgramRequest(
            seq_id=f"{form.prefix}-{name}", prompt=tuple(prompt), sampling_params={"max_tokens": max_tokens},
            priority=_priority(context, call), background=context.background, cache_salt=call.cache_salt,
            headers=context.headers,
            user=context.asked.user, session=context.asked.session_name,
        )  # fmt: skip
        answer = Answering(self._service, self._texts, request, form, call.model or self._names[0], context)
        if call.stream:
            usage = call.stream_options is not None and call.stream_options.include_usage
            return await answer.streamed(bool(usage))
        return await answer.whole()


def _priority(context: RequestContext, call: Call) -> int:
    """Return the priority of the header of vLLM's API, if it is an integer, else that of the body."""
    try:
        return int(context.headers[VLLM_PRIORITY_HEADER])
    except (KeyError, ValueError):
        return call.priority


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
        self, service: Service, texts: PromptTexts, request: ProgramRequest, form: Form, model: str,
        context: RequestContext,
    ) -> None:  # fmt: skip
        self._texts = texts
        self._request = request
        self._form = form
        self._run = RequestRun(service, request, context)
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
            self._context.failed = self._run.failed(error)
            raise self._context.failed from error

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


async def _read(http: Request, kind: type[C]) -> C:
    """Return the decoded body; raise :class:`~tercet.protocol.BadRequest` for features that are not supported."""
    fields = read_json(in_utf8(await http.body()))
    if not isinstance(fields, dict):
        raise BadRequest("the request's body must be a JSON object")
    given = cast("dict[str, Any]", fields)
    try:
        call = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        raise BadRequest(f"{field}: {first['msg']}" if field else first["msg"], field) from None
    for name in NOT_SERVED.keys() & given.keys():
        value = getattr(call, name, given[name])
        without_effect = any(type(value) is type(each) and value == each for each in NOT_SERVED[name])
        if value is not None and not without_effect:
            why = "the small OpenAI layer of simulated fleets does not support it; use --openai-layer vllm"
            raise BadRequest(f"{name}: {why}", name)
    return call


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


class _Flags(argparse.ArgumentParser):
    """A parser for the only flag of vLLM's that the small layer accepts, ``--api-key``."""

    def error(self, message: str) -> NoReturn:
        others = "the small OpenAI layer accepts only --api-key; for others use --openai-layer vllm"
        raise BadRequest(f"router-args: {message}; {others}", "router-args")


def flags_of(given: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags after ``--``; raise :class:`~tercet.protocol.BadRequest` for those of vLLM's layer."""
    parser = _Flags(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+", type=lambda text: given_key(text, "--api-key"))
    return parser.parse_args(list(given))


async def serve_small(
    config: RouterConfig, state: SharedState, gate: Gate, max_model_len: int, shutdown: Shutdown,
    pooling: PoolingServers, files: NamedFiles, heed_signals: Callable[[], object], shared: Shared | None = None,
) -> None:  # fmt: skip
    """Serve until a shutdown; ``heed_signals`` is called to make signals begin it.

    With ``shared``, serve as one of several workers: one of them accepts each connection, and the first one serves the
    admin address. ``files`` are the files that admin routes may name.
    """
    keys = RouterKeys(config, api_keys(flags_of(config.vllm_args)))
    keys.require_private(config.host, config)
    keys.require_private_admin(config.admin_address)
    names = [config.public_name, *config.model_aliases]
    app = small_app(state.service, PromptTexts(Path(config.model)), names, max_model_len)
    admin.install(app, state, names, files=files)
    put_layers_before(app, app.build_middleware_stack(), config, state, gate, keys, shutdown, pooling)
    server = server_of(app)

    async def end() -> None:
        heed_signals()  # after the server has begun, which heeds signals itself
        await shutdown.run(gate.close, state.service.give_up)

    ready = partial(log_ready, config) if shared is None else shared.serving
    own = config.admin_address if shared is None or not shared.index else None
    with listening_socket(config) if shared is None else nullcontext(shared.listening) as sock:
        async with admin_served(app, own):
            await state.serving()
            serving = asyncio.ensure_future(server.serve([sock]))
            following = asyncio.ensure_future(keep_running(keys.follow, "keys"))
            ending = asyncio.ensure_future(end())
            try:
                if await server.started_by(serving):
                    ready()
                await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
                server.should_exit = True
                if ending.done():
                    ending.result()
                await serving
            finally:
                for task in (following, ending, serving):
                    task.cancel()
