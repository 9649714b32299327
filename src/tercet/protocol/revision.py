"""Versions and fingerprints of an engine, and the rule by which two engines may exchange KV. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from tercet.protocol.addresses import KVLayout
from tercet.protocol.errors import LayoutMismatch


class TextFingerprint(msgspec.Struct, frozen=True):
    """Digests of a model's ``tokenizer``, including its vocabulary, and of its ``chat_template``; empty if unknown."""

    tokenizer: str = ""
    chat_template: str = ""


class Revision(msgspec.Struct, frozen=True):
    """Versions of Tercet and vLLM, the digest of a model's config and weights, its text, and the layout of its KV.

    Engines of one fleet may differ in it while they are replaced one by one. An empty field, or None, is not reported.
    """

    tercet: str = ""
    vllm: str = ""
    weights: str = ""
    text: TextFingerprint = TextFingerprint()
    layout: KVLayout | None = None


UNKNOWN_REVISION = Revision()


@lru_cache(maxsize=4096)
def kv_obstacle(sender: Revision, receiver: Revision) -> str:
    """Return the reason why KV of ``sender`` must not go to ``receiver``; empty if it may.

    Minor versions of Tercet may change its transport, and those of vLLM the bytes in a block, which a layout cannot
    show. A chat template does not matter: the same token ids have the same KV.
    """
    compared = (
        ("versions of Tercet", _minor(sender.tercet), _minor(receiver.tercet)),
        ("versions of vLLM", _minor(sender.vllm), _minor(receiver.vllm)),
        ("weights", sender.weights, receiver.weights),
    )
    for what, theirs, ours in compared:
        if theirs != ours:
            return f"their {what} differ: {theirs or 'not reported'} and {ours or 'not reported'}"
    theirs, ours = sender.text.tokenizer, receiver.text.tokenizer
    if theirs and ours and theirs != ours:
        return f"their tokenizers differ: {theirs} and {ours}"
    if sender.layout is not None and receiver.layout is not None:
        try:
            sender.layout.require_mappable(receiver.layout, "the receiver")
        except LayoutMismatch as error:
            return error.message
    return ""


def may_exchange_kv(one: Revision, other: Revision) -> bool:
    """Return True if two engines may work on one sequence: KV may go from each to the other."""
    return one is other or (not kv_obstacle(one, other) and not kv_obstacle(other, one))


def _minor(version: str) -> str:
    """Return the major and minor version, or the first word of another version, such as a simulated engine's."""
    found = re.match(r"[0-9]+\.[0-9]+|\S+", version)
    return found[0] if found else ""
