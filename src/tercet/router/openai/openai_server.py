"""vLLM's OpenAI server, assembled from vLLM's parts on the client that runs programs.

Relies on ``AsyncLLM.__init__`` getting its client from ``EngineCoreClient.make_async_mp_client``, on ``build_app`` not
wrapping the application in its layers yet, and on the launcher functions ``init_app_state`` and ``serve_http``;
``serve_http`` sets its signal handlers before its first wait, and puts its server into ``app.state.server``.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.config import create_ssl_context
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from tercet.aio.files import require_regular
from tercet.aio.importing import collect_rarely
from tercet.protocol import AdapterReport, BadRequest
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.sse import object_of
from tercet.router.openai.fast_path.preparing import fast_path
from tercet.router.openai.fast_path.request_stream import FastPath
from tercet.router.openai.program_client import ProgramClient, RouterLLM
from tercet.router.serve.service import Service
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.differences import CONVERTED_AS_TEXT, SYSTEM_BALANCES, cli_args, structured_outputs_config
from tercet.vllm_plugin.hooks import require_hooks
from tercet.vllm_plugin.start.before_forks import text_fingerprint
from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence, without_leak_reports
from tercet.wire.serving.client_connection import StreamingProtocol
from tercet.wire.serving.http_server import CLOSE_SECONDS, STARTED_POLL_S
from tercet.wire.serving.server_access import current

# Largest number of connections that wait to be accepted; uvicorn's value.
BACKLOG = 2048
# This is not a host name, so vLLM's check refuses all hosts; its message shows this text.
NO_DOMAIN = "(none; see --allowed-media-domains)"


@dataclass(frozen=True)
class OpenAIServer:
    """vLLM's application, and what the router puts around it."""

    # The router's outer layers replace its ``middleware_stack``.
    app: FastAPI
    # They answer requests.
    layers: ASGIApp
    # Streams may take this path instead.
    fast: FastPath | None


async def openai_server(args: argparse.Namespace, engine_client: Any) -> OpenAIServer:
    """Return the server of ``engine_client`` under vLLM's options ``args``, without a fast path."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from tercet.router.openai.body_models import bound_invocations, bound_routes

    tasks = await engine_client.get_supported_tasks()
    bound_invocations(tasks, engine_client.model_config)
    app = build_app(args, tasks, engine_client.model_config)
    bound_routes(app)
    describe_in_a_thread(app)
    await init_app_state(engine_client, app.state, args, tasks)
    messages = getattr(app.state, "anthropic_serving_messages", None)
    if messages is not None:
        app.state.anthropic_serving_messages = keeping_errors(messages)
    # vLLM's SageMaker layer may have built the stack of layers before.
    layers = app.middleware_stack or app.build_middleware_stack()
    return OpenAIServer(app, layers, None)


def describe_in_a_thread(app: FastAPI) -> None:
    """Make the first client that asks for ``/openapi.json`` wait alone: describing all routes takes about a second."""
    at = next((n for n, each in enumerate(app.routes) if getattr(each, "path", None) == app.openapi_url), None)
    if at is None:  # vLLM's --disable-fastapi-docs
        return
    route, describing = cast(Route, app.routes[at]), asyncio.Lock()

    async def described(request: Request) -> Response:
        async with describing:
            if app.openapi_schema is None:
                await asyncio.to_thread(app.openapi)
        return await route.endpoint(request)

    app.routes[at] = Route(route.path, described, include_in_schema=False)


def with_fast_path(server: OpenAIServer, args: argparse.Namespace, engine_client: Any) -> OpenAIServer:
    """Return ``server`` with the fast path for streams, if vLLM's options allow it.

    Raises :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` if the fast path does not support the installed vLLM.
    """
    require_hooks("fast path")
    engine_client.renderer.render_short_prompts_here(trusts_templates=args.trust_request_chat_template)
    return replace(server, fast=fast_path(server.layers, server.app.state, args, engine_client))


def text_of(engine_client: Any, args: argparse.Namespace) -> TextFingerprint:
    """Return the fingerprint of this server's text; a chat template from ``args`` is left out of it."""
    config = engine_client.model_config
    if config.skip_tokenizer_init:
        return TextFingerprint()
    fingerprint = text_fingerprint(engine_client.get_tokenizer())
    return fingerprint if args.chat_template is None else TextFingerprint(fingerprint.tokenizer)


def loads_adapters() -> bool:
    """True if vLLM's environment variable allows clients to load adapters while the server runs."""
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def import_vllm() -> None:
    """Import the parts of vLLM that the server needs, which takes seconds.

    Raises :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` before any part is used.
    """
    without_leak_reports()
    require_hooks("frontend")
    refuse_in_a_sentence()
    # Prompts are tokenised one by one: a pool of threads costs more time than it saves.
    os.environ.setdefault(PARALLEL_TOKENIZERS, "false")
    # A redirect from an image's host could lead to a host that is not in the list of allowed hosts.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    for module in ("vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)


def server_args(
    model: str, names: Sequence[str], host: str, port: int, max_model_len: int, more: Sequence[str]
) -> argparse.Namespace:
    """Return vLLM's options, parsed and checked by vLLM; ``more`` are the user's flags."""
    argv = [
        "--model", model, "--served-model-name", *names, "--host", host, "--port", str(port),
        "--max-model-len", str(max_model_len), "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", *more,
    ]  # fmt: skip
    args = _parser().parse_args(argv)
    cli_args().validate_parsed_serve_args(args)
    return args


def _parser() -> argparse.ArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = cli_args().make_arg_parser(FlexibleArgumentParser())
    return parser


def engine_client_over(service: Service, args: argparse.Namespace) -> Any:
    """Return vLLM's complete ``AsyncLLM``, on the client that runs the programs of ``service``."""
    import torch
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    from tercet.router.openai.router_renderer import own_renderers

    engine_args = AsyncEngineArgs.from_cli_args(args)
    # vLLM fetches images by ``http(s)`` from any host, unless the operator has named some.
    engine_args.allowed_media_domains = engine_args.allowed_media_domains or [NO_DOMAIN]
    model_config = engine_args.create_model_config()
    # A router runs no inference, so the weights' format does not matter (as in vLLM's render server).
    model_config.quantization = None
    # Processors of images cast their tensors to this type, which is used for nothing else. Here they stay exact: they
    # are cast to the engines' type once that is known.
    model_config.dtype = torch.float32
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=structured_outputs_config(engine_args),
    )
    client = ProgramClient(service)
    # AsyncLLM makes its own client of an engine's core and takes none, so the function that makes it is replaced for
    # this one call.
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: client)  # type: ignore[method-assign]
    try:
        with own_renderers():
            engine_client = RouterLLM(
                config, executor_class=Executor, log_stats=not args.disable_log_stats, log_requests=False
            )
    finally:
        EngineCoreClient.make_async_mp_client = original  # type: ignore[method-assign]
    client.attach(engine_client.output_processor)
    return engine_client


def listening_socket(args: argparse.Namespace, shared: socket.socket | None = None) -> socket.socket:
    """Return the socket to serve on, a new one or the ``shared`` one, with vLLM's settings."""
    from vllm.entrypoints.launchers.launcher import setup_server

    if shared is None:
        try:
            sock = setup_server(args, reuse_port=False)[1]
        except OSError as error:
            raise _taken(f"{args.host}:{args.port}", error) from error
        listen_alone(sock)
        return sock
    # Several workers share a bound socket. vLLM's function also prepares the process, so it is called for another port.
    elsewhere = argparse.Namespace(**{**vars(args), "port": 0})
    setup_server(elsewhere, reuse_port=False)[1].close()
    listen_alone(shared)
    return shared


def listen_alone(sock: socket.socket) -> None:
    """Listen on ``sock`` now: two processes can bind one address before either listens, and then only one can listen.

    Raises :class:`~tercet.protocol.BadRequest` in the other process.
    """
    # The loser of the two learns of it here, before it loads the tokenizer and the API.
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        where = ":".join(map(str, sock.getsockname()[:2]))
        sock.close()
        raise _taken(where, error) from error


def _taken(where: str, error: OSError) -> BadRequest:
    return BadRequest(f"port: cannot listen at {where}: {error.strerror}; choose another port", "port")


async def accept(
    app: FastAPI, args: argparse.Namespace, sock: socket.socket, shut_down: Callable[[], Awaitable[None]],
    peer_loads: tuple[memoryview[int], int] | None = None, on_ready: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Serve until the server ends, or ``shut_down`` returns, which handles signals and runs once the socket is served.

    ``peer_loads`` has the number of connections of each worker, and this worker's index: the worker with the fewest
    takes the next one. ``on_ready`` is called once, when connections are accepted.
    """
    from vllm.entrypoints.launchers.launcher import serve_http

    _settle()
    by_load: dict[str, Any] = {}
    if peer_loads is not None and not SYSTEM_BALANCES.is_here:
        by_load["peer_loads"] = peer_loads
    serving = asyncio.ensure_future(serve_http(
        app, sock=sock, http=StreamingProtocol, host=args.host, port=args.port,
        timeout_graceful_shutdown=CLOSE_SECONDS, timeout_keep_alive=keep_alive_seconds(),
        enable_ssl_refresh=args.enable_ssl_refresh, ssl_keyfile=args.ssl_keyfile, ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs, ssl_cert_reqs=args.ssl_cert_reqs, ssl_ciphers=args.ssl_ciphers,
        **by_load, log_level=args.uvicorn_log_level, access_log=not args.disable_uvicorn_access_log,
    ))  # fmt: skip
    await asyncio.sleep(0)  # until its first wait: vLLM's signal handlers are set then, and can be replaced
    ending = asyncio.ensure_future(shut_down())
    announcing = asyncio.ensure_future(_announce(app, on_ready))
    try:
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
            app.state.server.should_exit = True
        await (await serving)
    finally:
        announcing.cancel()
        ending.cancel()
        serving.cancel()


async def _announce(app: FastAPI, on_ready: Callable[[], object]) -> None:
    while not app.state.server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(STARTED_POLL_S)
    on_ready()


def _settle() -> None:
    from vllm.envs import enable_envs_cache

    # vLLM looks up dozens of variables for each request.
    enable_envs_cache()
    # The search for cycles took 5% of the time for tokens, in pauses of 10 ms.
    collect_rarely()


# ---- the adapters of a fleet ----------------------------------------------------------------------------------------

# Relies on ``OpenAIServingModels.lora_requests`` being the only source of adapters in vLLM's layer, which reads it as a
# mapping for each request and for ``/v1/models``; and on ``InputProcessor`` refusing an adapter only if its
# ``lora_config`` is missing.

# vLLM needs a number. A router loads no adapter: it sends the name to the engines, which number their adapters.
NUMBER = 1


class ServedAdapters(Mapping[str, LoRARequest]):
    """Live view of the adapters that ``known`` returns."""

    def __init__(self, known: Callable[[], Mapping[str, AdapterReport]]) -> None:
        self._known = known

    def __getitem__(self, name: str) -> LoRARequest:
        return LoRARequest(name, NUMBER, self._known()[name].path)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._known()))

    def __len__(self) -> int:
        return len(self._known())

    def __contains__(self, name: object) -> bool:
        return name in self._known()


def serve_adapters(state: Any, engine_client: Any, known: Callable[[], Mapping[str, AdapterReport]]) -> None:
    """Make vLLM's layer, whose application has this ``state``, serve the adapters that ``known`` returns."""
    state.openai_serving_models.lora_requests = ServedAdapters(known)
    engine_client.input_processor.lora_config = LoRAConfig()


# ---- errors of chat streams, for the streams that vLLM converts from them (Anthropic's API) -----------------------

# Relies on ``AnthropicServingMessages`` making its events from the chunks of ``chat_completion_stream_generator_raw``;
# an ``ErrorResponse`` among them ends the stream with an error. Up to vLLM 0.32, it makes them from the text of
# ``chat_completion_stream_generator``, and ``message_stream_converter`` yields ``error`` for text that does not begin
# with ``data:``.

ERROR_ITEM = 'data: {"error"'
# vLLM's converter cannot read this, and ends with an error; ``ErrorSend`` inserts the error's text.
NO_CHUNK = "error"


def keeping_errors(serving: Any) -> Any:
    """Return a copy of the serving object whose streams end with the chat stream's error, its status and message."""
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    keeping = copy.copy(serving)
    # Of the copy: what is set on it, as a parser, must count for the stream.
    generate = getattr(keeping, "chat_completion_stream_generator" + ("" if CONVERTED_AS_TEXT.is_here else "_raw"))

    async def texts(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        async for item in generate(*args, **kwargs):
            if item.startswith(ERROR_ITEM):
                error = object_of(item.encode()).get("error")
                current().stream_error = cast("dict[str, Any]", error) if isinstance(error, dict) else None
                yield NO_CHUNK
                return
            yield item

    async def chunks(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for chunk in generate(*args, **kwargs):
            if isinstance(chunk, ErrorResponse):
                current().stream_error = chunk.error.model_dump()
            yield chunk

    if CONVERTED_AS_TEXT.is_here:
        keeping.chat_completion_stream_generator = texts
    else:
        keeping.chat_completion_stream_generator_raw = chunks
    return keeping


# ---- vLLM's options --------------------------------------------------------------------------------------------------

# Each option is passed to vLLM's parts, implemented by the router, or refused at start. An option of a later vLLM that
# is not listed here is refused.
#
# Relies on ``make_arg_parser`` putting the server's own options into the group ``Frontend``, and the options of each of
# vLLM's configurations into a group with the configuration's name.

KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
# Groups of options for a router's own model configuration, which converts prompts to tokens and tokens to text.
HANDED_ON = frozenset({"ModelConfig", "MultiModalConfig", "StructuredOutputsConfig"})
# Options outside these groups that vLLM's serving objects, its application or its client use.
SERVED_BY_VLLM = frozenset(
    {"allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "anthropic_disabled_thinking_effort",
     "chat_template", "chat_template_content_format", "cohere_format", "cohere_is_reasoning_model",
     "default_chat_template_kwargs", "disable_fastapi_docs", "disable_log_stats", "enable_auto_tool_choice",
     "enable_force_include_usage", "enable_offline_docs", "enable_per_request_metrics", "enable_prompt_tokens_details",
     "enable_request_id_headers", "enable_scale_out", "enable_server_load_tracking", "enable_tokenizer_info_endpoint",
     "exclude_tools_when_tool_choice_none", "fingerprint_mode", "fingerprint_value", "log_error_stack", "middleware",
     "reasoning_effort_map", "response_role", "return_tokens_as_token_ids", "root_path", "sse_keep_alive_interval",
     "structured_outputs_config", "tokens_only", "tool_call_parser", "tool_parser_plugin", "tool_server",
     "tool_strict_level", "trust_request_chat_template", "trust_request_mm_kwargs"}
)  # fmt: skip
# Options that the router implements itself: keys, sockets, TLS and the server's log.
SERVED_HERE = frozenset(
    {"api_key", "disable_uvicorn_access_log", "enable_ssl_refresh", "help", "host", "model", "port",
     "served_model_name", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers", "ssl_keyfile", "uds",
     "uvicorn_log_level"}
)  # fmt: skip
_TLS = ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers", "ssl_cert_reqs", "enable_ssl_refresh")
_LOG = "set a router's log with --log-level, --log-format and --access-log before the --"
_ENGINES = "this flag configures engines; give it to them: tercet engine ... -- FLAG, or engine-args"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("aggregate_engine_logging", "disable_access_log_for_endpoints", "enable_log_deltas",
                     "enable_log_outputs", "enable_log_requests", "log_config_file", "log_level", "logging_config",
                     "max_log_len"), _LOG),
    **dict.fromkeys(("data_parallel_supervisor_port", "dp_supervisor_probe_failure_threshold",
                     "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s"), _ENGINES),
    **dict.fromkeys(("h11_max_header_count", "h11_max_incomplete_event_size"), "a router's HTTP parser is not h11"),
    **dict.fromkeys(("grpc", "grpc_port"), "a router serves HTTP only"),
    "api_server_count": "give --workers before the --",
    "config": "give the options of the file one by one",
    "enable_flash_late_interaction": "it configures pooling models, which run on separate servers: --pooling-server",
    "fail_on_environ_validation": "a router reports unknown TERCET_ variables by itself, and ignores vLLM's",
    "headless": "a router always serves an API",
    "lora_modules": "give --lora-modules before the --",
    "model_tag": "give --model before the --",
    "shutdown_timeout": "give --shutdown-timeout before the --",
}  # fmt: skip


def options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the group of every option, by the option's name."""
    groups: Any = parser._action_groups
    return {action.dest: str(group.title) for group in groups for action in group._group_actions}


def refusal_of(name: str, group: str) -> str | None:
    """Return the reason for which a router refuses the option ``name`` of ``group``; None if it accepts the option."""
    if name in REFUSED:
        return REFUSED[name]
    if name in SERVED_BY_VLLM or name in SERVED_HERE or group in HANDED_ON:
        return None
    return "routers do not support it" if group == "Frontend" else _ENGINES


def require_flags(given: Sequence[str], workers: int = 1) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for flags that vLLM does not accept, or that have no effect here."""
    parser = _parser()
    groups = options_of(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    for argument in given:  # vLLM's parser would replace --config by the options in its file
        if argument.partition("=")[0] == "--config":
            raise _refused("config", REFUSED["config"])
    options = vars(parser.parse_args(list(given)))
    for name in options:
        why = refusal_of(name, groups[name]) if name in groups else None
        if why is not None:
            raise _refused(name, why)
    if workers > 1 and options.get("uds"):
        raise _refused("uds", "several workers share a port; leave --workers out")
    keep_alive_seconds()
    certificate = options.get("ssl_certfile")
    if not certificate:
        for name in _TLS:
            if options.get(name):
                raise _refused(name, "TLS needs --ssl-certfile as well")
        return
    # uvicorn reads these files when it begins to serve, which is after the wait for engines: tried here first.
    try:
        for file in filter(None, (certificate, options.get("ssl_keyfile"), options.get("ssl_ca_certs"))):
            require_regular(Path(file))
        create_ssl_context(  # with a password, so that it never asks for one
            certificate, options.get("ssl_keyfile"), "none", ssl.PROTOCOL_TLS_SERVER,
            options.get("ssl_cert_reqs", ssl.CERT_NONE), options.get("ssl_ca_certs"), options.get("ssl_ciphers"),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise BadRequest(f"--ssl-certfile: TLS cannot be served with these files: {error}", "--ssl-certfile") from error


def keep_alive_seconds() -> int:
    """Return how long an idle connection of a client stays open; raises :class:`~tercet.protocol.BadRequest`."""
    text = os.environ.get(KEEP_ALIVE_VARIABLE, "5")
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise BadRequest(f"{KEEP_ALIVE_VARIABLE}: must be a whole number of seconds, is {text!r}", KEEP_ALIVE_VARIABLE)
    return seconds


def _refused(name: str, why: str) -> BadRequest:
    flag = f"--{name.replace('_', '-')}"
    return BadRequest(f"flags for vLLM: {flag} is not accepted here: {why}", flag)
