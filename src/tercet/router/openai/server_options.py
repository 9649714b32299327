"""vLLM's server options at a router: each is passed to vLLM's parts, implemented by the router, or refused at start.

Relies on ``make_arg_parser`` putting the server's own options into the group ``Frontend``, and the options of each of
vLLM's configurations into a group with the configuration's name. An option of a later vLLM that is not listed here is
refused.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tercet.aio.files import require_regular
from tercet.protocol import BadRequest

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
    "aggregate_engine_logging": _LOG,
    "api_server_count": "give --workers before the --",
    "config": "give the options of the file one by one",
    "data_parallel_supervisor_port": _ENGINES,
    "disable_access_log_for_endpoints": _LOG,
    "dp_supervisor_probe_failure_threshold": _ENGINES,
    "dp_supervisor_probe_interval_s": _ENGINES,
    "dp_supervisor_probe_timeout_s": _ENGINES,
    "enable_flash_late_interaction": "it configures pooling models, which run on separate servers: --pooling-server",
    "enable_log_deltas": _LOG,
    "enable_log_outputs": _LOG,
    "enable_log_requests": _LOG,
    "fail_on_environ_validation": "a router reports unknown TERCET_ variables by itself, and ignores vLLM's",
    "grpc": "a router serves HTTP only",
    "grpc_port": "a router serves HTTP only",
    "h11_max_header_count": "a router's HTTP parser is not h11",
    "h11_max_incomplete_event_size": "a router's HTTP parser is not h11",
    "headless": "a router always serves an API",
    "log_config_file": _LOG,
    "log_level": _LOG,
    "logging_config": _LOG,
    "lora_modules": "give --lora-modules before the --",
    "max_log_len": _LOG,
    "model_tag": "give --model before the --",
    "shutdown_timeout": "give --shutdown-timeout before the --",
}


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


def require_served(parser: argparse.ArgumentParser, given: Sequence[str], workers: int = 1) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for options that would have no effect.

    This function changes ``parser``, which cannot be used afterwards.
    """
    groups = options_of(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    for argument in given:  # vLLM's parser would replace --config by the options in its file
        if argument.partition("=")[0] == "--config":
            raise _refused("config", REFUSED["config"])
    found = vars(parser.parse_args(list(given)))
    for name in found:
        why = refusal_of(name, groups[name]) if name in groups else None
        if why is not None:
            raise _refused(name, why)
    if workers > 1 and found.get("uds"):
        raise _refused("uds", "several workers share a port; leave --workers out")
    _require_tls(found)
    keep_alive_seconds()


def keep_alive_seconds() -> int:
    """Return the time in seconds that an idle connection of a client stays open.

    Raises :class:`~tercet.protocol.BadRequest` if vLLM's variable for it is not a whole number of at least 0.
    """
    text = os.environ.get(KEEP_ALIVE_VARIABLE, "5")
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise BadRequest(f"{KEEP_ALIVE_VARIABLE}: must be a whole number of seconds, is {text!r}", KEEP_ALIVE_VARIABLE)
    return seconds


def _require_tls(found: Mapping[str, Any]) -> None:
    certificate = found.get("ssl_certfile")
    if not certificate:
        for name in _TLS:
            if found.get(name):
                raise _refused(name, "TLS needs --ssl-certfile as well")
        return
    try:
        for file in filter(None, (certificate, found.get("ssl_keyfile"), found.get("ssl_ca_certs"))):
            require_regular(Path(file))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, found.get("ssl_keyfile"), lambda: "")  # never prompts for a password
        context.verify_mode = ssl.VerifyMode(found.get("ssl_cert_reqs", ssl.CERT_NONE))
        if found.get("ssl_ca_certs"):
            context.load_verify_locations(found["ssl_ca_certs"])
        if found.get("ssl_ciphers"):
            context.set_ciphers(found["ssl_ciphers"])
    except (OSError, ValueError) as error:
        raise BadRequest(f"--ssl-certfile: TLS cannot be served with these files: {error}", "--ssl-certfile") from error


def _refused(name: str, why: str) -> BadRequest:
    flag = f"--{name.replace('_', '-')}"
    return BadRequest(f"flags for vLLM: {flag} is not accepted here: {why}", flag)
