"""Calls of the verbs as they arrive: their prompt, adapter and images, and checks against this engine.

A call is checked here, before it reaches the engine's core, or a connection that other calls share.
"""

from __future__ import annotations

import asyncio
import re

from tercet.engine.interface import AdapterTable, GenerationHalf, KeyedPrompt
from tercet.protocol import BadRequest, KVAddrInfo, KVLayout, LayoutMismatch
from tercet.protocol.wire import PrepRecvCall, Prompt, RemoteSendCall, StartGenerateCall
from tercet.transport import is_address

LEASE = re.compile(r"[0-9a-f]{32}")
Call = PrepRecvCall | RemoteSendCall | StartGenerateCall


class CallReader:
    """A reader of calls for one engine.

    Raises :class:`~tercet.protocol.BadRequest` for invalid calls.
    """

    def __init__(self, generation: GenerationHalf, adapters: AdapterTable) -> None:
        self._generation = generation
        self._adapters = adapters
        self.limits = generation.limits

    async def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, which may be text; text is tokenized in a thread, since it may be long."""
        if isinstance(prompt, str):
            tokens = await asyncio.to_thread(self._generation.encode, prompt)
        else:
            tokens = list(prompt)
        self.limits.check_prompt(tokens)
        return tokens

    async def keyed(self, call: Call, tokens: list[int]) -> KeyedPrompt:
        """Return a call's prompt, with these :meth:`tokens` and all other inputs of its KV.

        Raises :class:`~tercet.protocol.UnknownAdapter`, also for an adapter with other contents here, and
        :class:`~tercet.protocol.Conflict` if its files have changed.
        """
        adapter = await self._adapters.find(call.adapter, call.adapter_digest)
        self.limits.check_features(tokens, call.mm_features, call.adapter)
        features = tuple(feature.without_data() for feature in call.mm_features)
        return KeyedPrompt(tokens, call.cache_salt, adapter, features)

    def model_of(self, call: Call) -> str:
        """Return the name of the LoRA adapter of a call, or of the model."""
        return call.adapter or self._generation.model


def check_adapter(call: RemoteSendCall, digest: str) -> None:
    """Refuse KV of another adapter than the receiver needs; ``digest`` is that of this engine's adapter.

    Raises :class:`~tercet.protocol.LayoutMismatch`: engines with one name for different contents exchange no KV.
    """
    info = call.kv_addr_info
    if info.adapter == digest:
        return
    if not info.adapter or not digest:
        where = "no adapter" if not info.adapter else "an adapter"
        raise BadRequest(f"adapter: is {call.adapter!r}, and prep_recv on {info.engine} was for {where}", "adapter")
    raise LayoutMismatch(
        f"adapter: {call.adapter!r} has the digest {digest} here, and {info.adapter} on {info.engine}; "
        "load the same files on both under this name",
        "adapter",
    )


def check_send(call: RemoteSendCall, begin: int, end: int, length: int, layout: KVLayout) -> None:
    """Refuse a send of ``[begin, end)`` of ``length`` tokens that does not fit the receiver's reservation.

    Raises :class:`~tercet.protocol.BadRequest`, or :class:`~tercet.protocol.LayoutMismatch`.
    """
    info = call.kv_addr_info
    check_address(info)
    layout.require_mappable(info.layout, info.engine)
    if sorted(rank.rank for rank in info.ranks) != list(range(info.layout.num_ranks)):
        raise BadRequest("kv_addr_info: ranks: must name each rank of the layout once", "kv_addr_info")
    info.require_covers(begin, end)
    if call.sample and end != length:
        raise BadRequest(f"sample: needs the whole prompt, and end {end} is not its length {length}", "sample")


def check_address(info: KVAddrInfo) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an address that no engine has issued."""
    addresses = [address for rank in info.ranks for address in rank.addresses]
    well_formed = (
        LEASE.fullmatch(info.lease)
        and 0 <= info.begin < info.end
        and info.begin % info.layout.block_size == 0
        and info.ranks
        and all(rank.addresses for rank in info.ranks)
        and all(map(is_address, addresses))
        and len(info.group_begins) == len(info.layout.groups)
        and {len(counts) for counts in info.layout.stages} <= {len(info.layout.groups) or 1}
        and not any(begin % info.layout.block_size for begin in info.group_begins)
    )
    if info.transport != "tcp" or not well_formed:
        raise BadRequest("kv_addr_info: is not a value that prep_recv returned", "kv_addr_info")
