"""What the verbs ask of the engine's core: calls of the methods that :mod:`.core_methods` adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tercet.protocol import Content, KVLayout, from_wire
from tercet.transport import Push
from tercet.vllm_plugin.engine.connector_messages import ReservedBlocks, SendParams

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class EngineDescription(msgspec.Struct, frozen=True):
    """What the core says of itself, once.

    ``transports`` are each rank's addresses, ``agents`` address and secret of each rank's agent, ``workers`` those at
    which the rank's worker says that it lives. ``token`` marks requests as this engine's own. ``lease_ttl`` and
    ``reserve_wait`` are in seconds. ``kv_events`` are endpoint, replay endpoint and topic.
    """

    transports: list[list[str]]
    agents: list[tuple[str, str]]
    workers: list[tuple[str, str]]
    layout: KVLayout
    token: str
    lease_ttl: float
    reserve_wait: float
    kv_events: dict[str, Any] | None


class CoreCalls:
    """Calls to the core, each answered between two engine steps; expected failures are raised as Tercet's errors."""

    def __init__(self, client: AsyncLLM) -> None:
        self._client = client

    async def describe(self) -> EngineDescription:
        """Attach to the scheduler. Raises :class:`~tercet.protocol.EngineError` if it runs without the connector."""
        return msgspec.convert(await self._call("tercet_describe"), EngineDescription)

    async def reserve(self, lease: str, tokens: list[int], cache_salt: str | None) -> ReservedBlocks:
        """Reserve blocks for ``tokens``. Raises :class:`~tercet.protocol.NoSpace`."""
        return msgspec.convert(await self._call("tercet_reserve", lease, tokens, cache_salt), ReservedBlocks)

    async def extend(self, lease: str, tokens: list[int], cache_salt: str | None) -> ReservedBlocks:
        """Reserve more blocks for a lease.

        Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.UnknownSequence` or
        :class:`~tercet.protocol.BadRequest`; the lease is as it was then.
        """
        return msgspec.convert(await self._call("tercet_extend", lease, tokens, cache_salt), ReservedBlocks)

    async def give_up(self, lease: str) -> None:
        """Have :meth:`reserve` raise what keeps it waiting."""
        await self._call("tercet_give_up", lease)

    async def commit(self, lease: str, valid: Content) -> None:
        """Make received KV findable; raises :class:`~tercet.protocol.EngineError` if it is of other tokens."""
        await self._call("tercet_commit", lease, valid.end, valid.digest)

    async def release(self, lease: str, valid_end: int) -> int:
        """Give a lease's blocks back; its valid end. Raises :class:`~tercet.protocol.UnknownSequence`."""
        return await self._call("tercet_release", lease, valid_end)

    async def push_cached(self, tokens: list[int], cache_salt: str | None, send: SendParams) -> Push | None:
        """Pin KV, if all of it is cached; what to push then."""
        found = await self._call("tercet_push_cached", tokens, cache_salt, msgspec.to_builtins(send))
        return msgspec.convert(found, Push | None)

    async def end_send(self, send_id: str) -> None:
        """Stop a send and unpin its blocks.

        Raises :class:`~tercet.protocol.UnknownSequence` if its request has not arrived yet.
        """
        await self._call("tercet_end_send", send_id)

    async def status(self) -> dict[str, Any]:
        """Load and holdings, as fields of :class:`~tercet.protocol.EngineStatus`."""
        return await self._call("tercet_status")

    async def _call(self, method: str, *args: Any) -> Any:
        result, error = await self._client.engine_core.call_utility_async(method, *args)
        if error is not None:
            code, message, param = error
            raise from_wire(500, {"error": {"code": code, "message": message, "param": param}})
        return result
