"""A simulated engine as a server process: the part of an OpenAI server that benchmarks of one engine need."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Literal

import aiohttp
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tercet import __version__
from tercet.aio.files import descriptors_watched
from tercet.aio.importing import collect_rarely
from tercet.aio.tasks import signals_to
from tercet.protocol import BadRequest, EngineStatus, Output, Request, Revision
from tercet.protocol.access import key_of, secrets_of
from tercet.protocol.headers import PREFILLER_HEADER
from tercet.protocol.names import AllowedPrefillers
from tercet.protocol.spans import VerbTrace
from tercet.protocol.wire import JSON, Salt, TokenId
from tercet.settings import SECRET_VARIABLE
from tercet.settings.process_settings import API_KEY_VARIABLE, PrefillBudget, clients_see_traces
from tercet.wire.callers import BearerKeys
from tercet.wire.client import remote_prefill
from tercet.wire.client.remote_prefill import PrefillAttempts, RemotePrefill
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving.answers import require_trace_reader, wants_trace
from tercet.wire.serving.http_server import json_response, served, unless_disconnected
from tercet.wire.serving.verb_routes import event_stream, together
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.sim_engine import SimEngine
from tercet_lab.sim.sim_verbs import HeldBodies, HttpNetwork, SimVerbs, call_in, text_of, tokens_of
from tercet_lab.sim.step_times import Profile

# vLLM's names, so that code that reads the load of a real engine can read this engine's.
GAUGES = {
    "vllm:num_requests_running": ("Running sequences.", "running"),
    "vllm:num_requests_waiting": ("Waiting sequences.", "waiting"),
    "vllm:kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", "kv_cache_usage"),
    "tercet_sim_leases": ("Open leases.", "leases"),
    "tercet_sim_sends": ("KV sends in progress.", "sends"),
}
COUNTERS = {
    "steps": "Engine steps.",
    "preemptions": "Running sequences that lost their blocks.",
    "adapter_loads": "LoRA adapters loaded into a batch.",
    "evicted": "Cached blocks that were evicted.",
}


class StreamOptions(msgspec.Struct, frozen=True):
    """The body's ``stream_options``. With ``include_usage``, the last chunk has the token counts."""

    include_usage: bool = False


class TokenizeCall(msgspec.Struct, frozen=True):
    """The body of ``POST /tokenize``."""

    prompt: str


class CompletionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``. Options that this model ignores (temperature, ...) are allowed."""

    prompt: str | list[TokenId]
    model: str | None = None
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: Salt | None = None
    n: Literal[1] = 1
    logprobs: Literal[None] = None


class OpenAI:
    """The handlers of the OpenAI API for one engine.

    ``model`` is its public name, ``root`` the path of its tokenizer (None: unknown). A request may name engines of
    ``allowed`` to prefill; ``remote`` calls them. ``require_trace_reader`` raises for a caller who may not see traces.
    """

    def __init__(
        self, engine: SimEngine, model: str, root: str | None, allowed: AllowedPrefillers, remote: RemotePrefill,
        require_trace_reader: Callable[[HttpRequest], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._model = model
        self._root = root
        self._allowed = allowed
        self._remote = remote
        self._require_trace_reader = require_trace_reader
        self._numbers = itertools.count()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]

    async def completions(self, http: HttpRequest) -> Response:
        """Generate on this engine. If the request's header names engines that prefill, they prefill first."""
        if traced := wants_trace(http.headers):
            self._require_trace_reader(http)
        call = await call_in(http, CompletionCall, (JSON,))
        if call.model not in (None, self._model):
            raise BadRequest(f"model: {call.model!r:.100} is not served here; use {self._model}", "model")
        name = f"cmpl-{next(self._numbers)}"
        request = Request(
            seq_id=name,
            prompt=tokens_of(call.prompt),
            sampling_params={"max_tokens": call.max_tokens},
            cache_salt=call.cache_salt,
        )
        named, trace = http.headers.get(PREFILLER_HEADER), VerbTrace()
        hosts = self._allowed.named(named) if named is not None and self._allowed else ()
        answer = _CompletionAnswer(name, self._model, call, request.num_tokens)
        if traced:
            answer.trace = trace
        outputs = self._outputs(request, hosts, trace)
        if call.stream:
            return await event_stream(http, answer.chunks(outputs), end=b"data: [DONE]\n\n")
        whole = await unless_disconnected(http, together(outputs))
        return json_response({**answer.chunk(whole), "usage": answer.usage(len(whole.token_ids)), **answer.traced()})

    async def _outputs(self, request: Request, hosts: Sequence[str], trace: VerbTrace) -> AsyncGenerator[Output]:
        """Yield the outputs of this engine, for which one of ``hosts`` prefills."""
        async with AsyncExitStack() as stack:
            begin = 0
            if hosts:
                begin = await stack.enter_async_context(self._remote.prefilled(self._engine, request, hosts, trace))
            outputs = await stack.enter_async_context(aclosing(self._engine.start_generate(request, begin)))
            async for output in outputs:
                yield output

    async def tokenize(self, http: HttpRequest) -> Response:
        """Answer with the tokens of a text, in the form of vLLM's server."""
        tokens = tokens_of((await call_in(http, TokenizeCall, (JSON,))).prompt)
        length = self._engine.profile.max_model_len
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def models(self, http: HttpRequest) -> Response:
        length = self._engine.profile.max_model_len
        entry = {"id": self._model, "object": "model", "owned_by": "tercet", "max_model_len": length}
        return json_response({"object": "list", "data": [{**entry, "root": self._root or self._model}]})

    async def health(self, http: HttpRequest) -> Response:
        return Response()

    async def version(self, http: HttpRequest) -> Response:
        return json_response({"version": f"tercet {__version__}, simulated {self._engine.profile.name}"})

    async def metrics(self, http: HttpRequest) -> Response:
        found = generate_latest(_StatusMetrics(self._model, await self._engine.status()))
        found += b"".join(generate_latest(each) for each in remote_prefill.METRICS)
        return Response(found, headers={"content-type": CONTENT_TYPE_LATEST})


class _CompletionAnswer:
    """The chunks of one completion."""

    def __init__(self, name: str, model: str, call: CompletionCall, prompt_tokens: int) -> None:
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model}
        self._call = call
        self._prompt_tokens = prompt_tokens
        self.trace: VerbTrace | None = None

    async def chunks(self, outputs: AsyncGenerator[Output]) -> AsyncGenerator[dict[str, Any]]:
        tokens = 0
        async with aclosing(outputs):
            async for output in outputs:
                tokens += len(output.token_ids)
                yield self.chunk(output)
        if self._call.stream_options is not None and self._call.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": self.usage(tokens)}
        if self.trace is not None:
            yield self.traced()

    def chunk(self, output: Output) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0, "text": text_of(output.token_ids), "logprobs": None, "finish_reason": output.finish_reason,
        }  # fmt: skip
        if self._call.return_token_ids:
            choice["token_ids"] = output.token_ids
        return {**self._head, "choices": [choice]}

    def traced(self) -> dict[str, Any]:
        """Return the request's trace for the answer, or an empty dict if the client did not request it."""
        return {} if self.trace is None else {"tercet": self.trace}

    def usage(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


class _StatusMetrics(Collector):
    """An engine's status as Prometheus metrics."""

    def __init__(self, model: str, status: EngineStatus) -> None:
        self._model = model
        self._status = status

    def collect(self) -> Iterable[Metric]:
        for name, (meaning, field) in GAUGES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=["model_name"])
            gauge.add_metric([self._model], float(getattr(self._status, field)))
            yield gauge
        for name, value in self._status.counters.items():
            counter = CounterMetricFamily(f"tercet_sim_{name}", COUNTERS[name], labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one simulated engine and its server.

    The server listens at ``host`` and ``port``; ``url`` is the engine's URL for other engines. ``model`` is the name in
    the OpenAI API, ``root`` a checkpoint whose tokenizer clients may use (None: unknown). ``prefill_hosts`` are the
    engines that a request may name to prefill, ``prefill_budget`` their time limits. ``secret`` is the fleet's secret;
    None reads it from the environment.
    """

    name: str
    profile: Profile
    options: EngineOptions = EngineOptions(stream_every=1)
    host: str = "127.0.0.1"
    port: int
    url: str
    model: str
    root: str | None = None
    prefill_hosts: str = ""
    prefill_budget: PrefillBudget = PrefillBudget()
    secret: str | None = None


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncGenerator[SimEngine]:
    """Serve the engine while the context is open. Raise ``OSError`` if the address is in use."""
    # The real latency of a call replaces the profile's.
    profile = msgspec.structs.replace(config.profile, call=0.0)
    allowed = AllowedPrefillers(config.prefill_hosts, "prefill-hosts")

    async def ours() -> Revision:
        return (await engine.status()).revision

    secret = key_of(os.environ.get(SECRET_VARIABLE, "") if config.secret is None else config.secret, SECRET_VARIABLE)
    api_key = key_of(os.environ.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session,
        RemotePrefill(PrefillAttempts(config.prefill_budget), ours, secret or api_key) as remote,
    ):
        network = HttpNetwork(profile.transfer, session, secret or api_key)
        engine = SimEngine(config.name, profile, network, config.options, address=config.url)
        verbs = SimVerbs(engine, [*secrets_of(secret), api_key], config.model)
        openai = OpenAI(
            engine, config.model, config.root, allowed, remote, _trace_rule(secret, bool(secret or api_key))
        )
        try:
            async with served(HeldBodies(verbs.app(openai.routes())), (config.host, config.port)):
                try:
                    yield engine
                finally:
                    await verbs.relay.close()
        finally:
            await network.posting.close()


def _trace_rule(secret: str, is_keyed: bool) -> Callable[[HttpRequest], None]:
    """Return the check of callers who ask for a trace: that of a vLLM engine."""
    if clients_see_traces():
        return lambda http: None
    secrets = BearerKeys(secrets_of(secret))
    return lambda http: require_trace_reader(http.scope, secrets, is_keyed)


def serve(config: ServerConfig) -> None:
    """Serve one simulated engine until SIGINT or SIGTERM."""
    import uvloop

    with exporting_spans("tercet-engine", {"service.instance.id": config.name}):
        collect_rarely()
        uvloop.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    stopped = asyncio.Event()
    with signals_to(stopped.set, stopped.set):
        async with descriptors_watched(), serving(config):
            await stopped.wait()
