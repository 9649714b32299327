"""Which engines may exchange KV, by what they state about themselves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import KVLayout, LayoutMismatch, Revision, TextFingerprint, kv_obstacle, may_exchange_kv

LAYOUT = KVLayout(
    model="weights", dtype="bfloat16", num_layers=2, num_kv_heads=4, head_size=8, block_size=16, block_bytes=2048,
    tp_size=1, packing="cpu-amx",
)  # fmt: skip
OURS = Revision("0.3.0", "0.32.0", "weights", TextFingerprint("tokenizer", "template"), LAYOUT)


def changed(**fields: object) -> Revision:
    return msgspec.structs.replace(OURS, **fields)


@pytest.mark.parametrize(
    "other",
    [
        changed(),
        changed(tercet="0.3.7"),
        changed(vllm="0.32.1.dev4+cpu"),
        changed(text=TextFingerprint("tokenizer", "another template")),
        changed(text=TextFingerprint()),
        changed(layout=None),
        changed(layout=msgspec.structs.replace(LAYOUT, splits_by_token=False)),
    ],
)
def test_these_may(other: Revision) -> None:
    assert may_exchange_kv(OURS, other)
    assert may_exchange_kv(other, OURS)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (changed(tercet="0.4.0"), "versions of Tercet differ: 0.3 and 0.4"),
        (changed(vllm="0.33.0"), "versions of vLLM differ: 0.32 and 0.33"),
        (changed(vllm=""), "versions of vLLM differ: 0.32 and not reported"),
        (changed(weights="others"), "weights differ: weights and others"),
        (changed(text=TextFingerprint("another", "template")), "tokenizers differ: tokenizer and another"),
        (changed(layout=msgspec.structs.replace(LAYOUT, packing="cpu-vec")), "packing is 'cpu-amx' here"),
        (changed(layout=msgspec.structs.replace(LAYOUT, block_size=32)), "block_size is 16 here"),
        (changed(layout=msgspec.structs.replace(LAYOUT, drafter="eagle")), "drafter"),
        (Revision(), "differ"),
    ],
)
def test_these_must_not(other: Revision, why: str) -> None:
    assert why in kv_obstacle(OURS, other)
    assert not may_exchange_kv(OURS, other)
    assert not may_exchange_kv(other, OURS)


LAYOUTS = st.builds(
    KVLayout,
    model=st.just("weights"), dtype=st.sampled_from(["bfloat16", "float32"]), num_layers=st.just(2),
    num_kv_heads=st.sampled_from([2, 4]), head_size=st.just(8), block_size=st.sampled_from([16, 32]),
    block_bytes=st.sampled_from([1024, 2048]), tp_size=st.sampled_from([1, 2, 3]), packing=st.just("p"),
    splits_by_head=st.booleans(), splits_by_token=st.booleans(),
)  # fmt: skip


@given(LAYOUTS, LAYOUTS)
def test_the_rule_is_the_engines_own(one: KVLayout, other: KVLayout) -> None:
    """What is filtered is what engines refuse, not more and not less."""
    refused = False
    for sender, receiver in ((one, other), (other, one)):
        try:
            sender.require_mappable(receiver, "it")
        except LayoutMismatch:
            refused = True
    assert may_exchange_kv(changed(layout=one), changed(layout=other)) is not refused


@given(LAYOUTS, LAYOUTS)
def test_it_is_symmetric(one: KVLayout, other: KVLayout) -> None:
    ours, theirs = changed(layout=one), changed(layout=other)
    assert may_exchange_kv(ours, ours)
    assert may_exchange_kv(ours, theirs) == may_exchange_kv(theirs, ours)
