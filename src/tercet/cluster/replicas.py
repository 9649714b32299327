"""Engines that are the data-parallel ranks of one group, so that each holds a part of a model's experts."""

from __future__ import annotations

from collections.abc import Sequence

from tercet.cluster.engine_command import value_of
from tercet.cluster.ports import free_ports
from tercet.protocol import BadRequest

SIZE = ("--data-parallel-size", "-dp")
RANK = ("--data-parallel-rank", "-dpn")
ENGINE_ARGS = "engine-args"


def is_group(args: Sequence[str]) -> bool:
    """Whether engines with these flags are ranks of a group, which no engine can leave or come back to."""
    return value_of(args, *SIZE) not in (None, "1")


def rank_flags(args: Sequence[str], engines: int, host: str) -> list[tuple[str, ...]]:
    """Flags of each of a fleet's engines in addition to ``args``: its rank, and the ranks' meeting address.

    vLLM calls it external load balancing: each rank has an API server, and callers choose. Raises
    :class:`~tercet.protocol.BadRequest` if there are more or fewer engines than ranks.
    """
    size = value_of(args, *SIZE)
    if not is_group(args):
        return [()] * engines
    if size != str(engines):
        raise BadRequest(
            f"{ENGINE_ARGS}: --data-parallel-size is {size}, and this fleet has {engines} engines, one per "
            "rank; give that number of --prefill, --decode and --both together",
            ENGINE_ARGS,
        )
    if value_of(args, *RANK) is not None:
        raise BadRequest(
            f"{ENGINE_ARGS}: every engine gets its --data-parallel-rank automatically; leave it out", ENGINE_ARGS
        )
    (port,) = free_ports(host, 1)
    meeting = ("--data-parallel-address", host, "--data-parallel-rpc-port", str(port))
    return [("--data-parallel-rank", str(rank), *meeting) for rank in range(engines)]
