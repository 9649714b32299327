"""Engines as data-parallel ranks of one group, each of which holds a part of a model's experts."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.cluster.engine_command import value_of
from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest

SIZE = ("--data-parallel-size", "-dp")
RANK = ("--data-parallel-rank", "-dpn")
ENGINE_ARGS = "engine-args"


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
