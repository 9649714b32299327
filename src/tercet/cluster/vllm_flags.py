"""Flags of vLLM that a command passes on: which ones are refused, and what Tercet reads of them.

Errors in them are found before engines start, which takes a minute. No module here imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest

KV_TRANSFER = "--kv-transfer-config"
KV_TRANSFER_CONFIG: Mapping[str, str] = {
    "kv_connector": "TercetConnector",
    "kv_connector_module_path": "tercet.vllm_plugin.connector",
    "kv_role": "kv_both",
}
GPU_MEMORY = "--gpu-memory-utilization"
STAGES = ("--pipeline-parallel-size", "-pp")
SIZE = ("--data-parallel-size", "-dp")
RANK = ("--data-parallel-rank", "-dpn")
ENGINE_ARGS = "engine-args"
# Tercet sets these flags: a different value would change the server's address or model.
_TERCETS_OWN = ("--model", "--served-model-name", "--host", "--port")


def check_flags(args: Sequence[str], where: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for flags that cannot be forwarded; ``where`` names their source.

    vLLM checks all other flags.
    """
    if args and not args[0].startswith("-"):
        raise BadRequest(f"{where}: {args[0]!r} is not a flag of vLLM; remove it, or begin with a flag", where)
    for flag, _ in flags_in(args):
        if flag in _TERCETS_OWN:
            raise BadRequest(f"{where}: {flag} is a flag of Tercet; give it before --, or as a separate key", where)


def check_engine_flags(args: Sequence[str], where: str) -> None:
    """Do as :func:`check_flags`, and check the values of the flags that Tercet reads."""
    check_flags(args, where)
    for read in (ranks_of, gpu_memory_of, kv_transfer_config):
        read(args)


def value_of(args: Sequence[str], *names: str) -> str | None:
    """Return the last value of a flag with one of these ``names``: ``""`` without a value, None without the flag."""
    return next((value for flag, value in reversed(list(flags_in(args))) if flag in names), None)


def without(args: Sequence[str], name: str) -> list[str]:
    """Return ``args`` without one flag that takes a value."""
    kept: list[str] = []
    skip = False
    for arg in args:
        if skip:
            skip = False
        elif _spelling(arg) == name:
            skip = "=" not in arg
        else:
            kept.append(arg)
    return kept


def flags_in(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each flag with its value, written as ``--flag value`` or ``--flag=value``."""
    for index, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        _, equals, value = arg.partition("=")
        following = args[index + 1] if index + 1 < len(args) else ""
        yield _spelling(arg), value if equals else "" if following.startswith("-") else following


def _spelling(arg: str) -> str:
    """Return a flag's name as vLLM documents it; vLLM also accepts ``--max_model_len``."""
    return arg.split("=", 1)[0].replace("_", "-") if arg.startswith("--") else arg.split("=", 1)[0]


def kv_transfer_config(args: Sequence[str]) -> str:
    """Return Tercet's ``--kv-transfer-config`` with the caller's keys, such as ``kv_connector_extra_config``."""
    text = value_of(args, KV_TRANSFER)
    if text is None:
        return json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":"))
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{KV_TRANSFER}: {error}", KV_TRANSFER) from error
    for key, needed in KV_TRANSFER_CONFIG.items():
        if given.get(key, needed) != needed:
            raise BadRequest(f"{KV_TRANSFER}: {key} must be {needed}, is {given[key]}", KV_TRANSFER)
    return json.dumps({**KV_TRANSFER_CONFIG, **given}, separators=(",", ":"))


def ranks_of(args: Sequence[str]) -> int:
    """Return the number of workers that vLLM starts for an engine with these flags."""
    ranks = 1
    for flag, short in (("--tensor-parallel-size", "-tp"), STAGES):
        value = value_of(args, flag, short)
        if value is None:
            continue
        if not value.isdigit() or int(value) < 1:
            raise BadRequest(f"{flag}: must be a whole number, at least 1, is {value!r}", flag)
        ranks *= int(value)
    return ranks


def gpu_memory_of(args: Sequence[str]) -> float | None:
    """Return an engine's share of a device's memory, from 0 to 1, in these flags; None if not set."""
    value = value_of(args, GPU_MEMORY)
    if value is None:
        return None
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadRequest(f"{GPU_MEMORY}: must be greater than 0 and at most 1, is {value!r}", GPU_MEMORY)
    return share


def is_group(args: Sequence[str]) -> bool:
    """True if engines with these flags are ranks of a group, which an engine cannot leave or rejoin."""
    return value_of(args, *SIZE) not in (None, "1")


def rank_flags(args: Sequence[str], engines: int, host: str) -> list[tuple[str, ...]]:
    """Return the flags of each engine in addition to ``args``: its rank, and the address at which ranks meet.

    vLLM calls this external load balancing: each rank has an API server, and callers choose one. Raises
    :class:`~tercet.protocol.BadRequest` if the number of engines differs from that of ranks.
    """
    size = value_of(args, *SIZE)
    if not is_group(args):
        return [()] * engines
    if size != str(engines):
        raise BadRequest(
            f"{ENGINE_ARGS}: --data-parallel-size is {size}, but this fleet has {engines} engines, and each is one "
            f"rank; give --prefill, --decode and --both that sum to {size}",
            ENGINE_ARGS,
        )
    if value_of(args, *RANK) is not None:
        raise BadRequest(
            f"{ENGINE_ARGS}: every engine gets its --data-parallel-rank automatically; leave it out", ENGINE_ARGS
        )
    (port,) = free_ports(host, 1)
    meeting = ("--data-parallel-address", host, "--data-parallel-rpc-port", str(port))
    return [("--data-parallel-rank", str(rank), *meeting) for rank in range(engines)]
