"""Checks at the edge, before a call reaches the engine's core, or a connection that other calls share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet.protocol import BadRequest, KVAddrInfo, KVLayout, LayoutMismatch, MultiModalFeature
from tercet.protocol.content import require_placed
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import is_address
from tercet.vllm_plugin.mm_features import most_features_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LEASE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ModelLimits:
    """The limits of the engine's model: token ids below ``vocab_size``, and at most ``max_model_len`` tokens.

    ``most_features`` has, for each kind, the largest number of images and the like in a prompt.
    ``adapters_change_features`` is True if an adapter changes how the model sees them.
    """

    vocab_size: int
    max_model_len: int
    most_features: Mapping[str, int] = field(default_factory=dict[str, int])
    adapters_change_features: bool = False

    def check_prompt(self, tokens: list[int]) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a prompt that the model cannot process."""
        if not tokens:
            raise BadRequest("prompt: is empty", "prompt")
        if max(tokens) >= self.vocab_size:
            raise BadRequest(f"prompt: token id {max(tokens)} is outside the vocabulary of {self.vocab_size}", "prompt")
        if len(tokens) > self.max_model_len:
            raise BadRequest(
                f"prompt: {len(tokens)} tokens exceed the model's maximum of {self.max_model_len}", "prompt"
            )  # fmt: skip

    def check_output(self, tokens: list[int], output: list[int]) -> None:
        """Raise as :meth:`check_prompt` does, for output that exists already."""
        if output and max(output) >= self.vocab_size:
            raise BadRequest(f"output: token id {max(output)} is outside the vocabulary", "output")
        if output and len(tokens) + len(output) >= self.max_model_len:
            raise BadRequest(
                f"output: {len(tokens)} + {len(output)} tokens leave no room in the model's {self.max_model_len}",
                "output",
            )

    def check_features(self, tokens: list[int], features: Sequence[MultiModalFeature], adapter: str | None) -> None:
        """Raise as :meth:`check_prompt` does, for the images and the like of a prompt."""
        require_placed(features, len(tokens))
        for modality, count in Counter(feature.modality for feature in features).items():
            most = self.most_features.get(modality)
            if most is None:
                raise BadRequest(
                    f"mm_features: modality: this engine's model does not accept {modality}", "mm_features"
                )
            if count > most:
                raise BadRequest(
                    f"mm_features: {count} of {modality}, and this engine accepts at most {most} in a prompt "
                    "(--limit-mm-per-prompt)",
                    "mm_features",
                )
        if features and adapter is not None and self.adapters_change_features:
            raise BadRequest(
                "mm_features: this engine's adapters change how the model sees images "
                "(enable_tower_connector_lora), so KV of images cannot be identified",
                "mm_features",
            )


def limits_of(client: AsyncLLM) -> ModelLimits:
    """Return the limits of the engine behind ``client``."""
    model, lora = client.vllm_config.model_config, client.vllm_config.lora_config
    changing = lora is not None and lora.enable_tower_connector_lora
    most = most_features_of(client.renderer)
    return ModelLimits(model.get_vocab_size(), model.max_model_len, most, changing)


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
    if begin < info.begin:
        raise BadRequest(f"begin: {begin} is before {info.begin}, where the reservation starts", "begin")
    if end > info.end:
        raise BadRequest(f"end: {end} is past {info.end}, where the reservation ends", "end")
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
