"""What the edge refuses, with the field's name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tercet.engine.edge import check_send
from tercet.engine.interface import ModelLimits
from tercet.protocol import BadRequest, KVAddrInfo, KVLayout, LayoutMismatch, RankAddress
from tercet.protocol.wire import RemoteSendCall

LIMITS = ModelLimits(vocab_size=100, max_model_len=10)
LAYOUT = KVLayout(
    model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_size=8, block_size=16, block_bytes=2048, tp_size=1,
    packing="cpu-vec", splits_by_head=True, splits_by_token=True,
)  # fmt: skip
INFO = KVAddrInfo("f" * 32, "decode-0", 16, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:9000",)),), LAYOUT)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [([], "is empty"), ([100], "outside the vocabulary of 100"), ([1] * 11, "11 tokens exceed the model's maximum")],
)
def test_prompts_that_the_model_cannot_take(tokens: list[int], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        LIMITS.check_prompt(tokens)
    assert caught.value.param == "prompt"


def test_a_prompt_may_fill_the_model_and_use_every_token() -> None:
    LIMITS.check_prompt([99] * 10)


@pytest.mark.parametrize("output", [[100], [1] * 5])
def test_output_that_the_model_cannot_have_made(output: list[int]) -> None:
    with pytest.raises(BadRequest) as caught:
        LIMITS.check_output([1] * 5, output)
    assert caught.value.param == "output"


def test_output_may_leave_room_for_one_token() -> None:
    LIMITS.check_output([1] * 5, [1] * 4)
    LIMITS.check_output([1] * 10, [])


def check(begin: int = 16, end: int = 48, length: int = 48, sample: bool = False, **info: Any) -> None:
    call = RemoteSendCall(
        prompt=[1] * length, seq_id="s", kv_addr_info=msgspec.structs.replace(INFO, **info), begin=begin, end=end,
        sample=sample,
    )  # fmt: skip
    check_send(call, begin, end, length, LAYOUT)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"begin": 15}, "begin"),
        ({"end": 49, "length": 60}, "end"),
        ({"sample": True, "length": 50}, "sample"),
        ({"lease": "F" * 32}, "kv_addr_info"),
        ({"lease": ""}, "kv_addr_info"),
        ({"transport": "pigeon"}, "kv_addr_info"),
        ({"ranks": ()}, "kv_addr_info"),
        ({"ranks": (RankAddress(1, ("tcp://127.0.0.1:1",)),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("tcp://127.0.0.1:1",)), RankAddress(0, ("tcp://127.0.0.1:1",)))}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ()),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("tcp://127.0.0.1:65536",)),)}, "kv_addr_info"),
        ({"ranks": (RankAddress(0, ("ipc:///tmp/somewhere",)),)}, "kv_addr_info"),
    ],
    ids=str,
)
def test_sends_that_no_reservation_has_a_place_for(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(**wrong)
    assert caught.value.param == param


def test_sends_to_another_model_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="model"):
        check(layout=msgspec.structs.replace(LAYOUT, model="other"))


def ranks(count: int) -> tuple[RankAddress, ...]:
    return tuple(RankAddress(number, (f"tcp://127.0.0.1:{9000 + number}",)) for number in range(count))


@pytest.mark.parametrize("stages", [((1,),), ((1, 1), (0, 1)), ((1,), (1, 0)), ((), ())], ids=str)
def test_stages_that_no_engine_has(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises((BadRequest, LayoutMismatch)):
        check(layout=msgspec.structs.replace(LAYOUT, stages=stages), ranks=ranks(len(stages) - (len(stages) == 1)))


def test_each_stage_has_ranks() -> None:
    staged = msgspec.structs.replace(LAYOUT, stages=((1,), (1,)))
    check(layout=staged, ranks=ranks(2))
    for count in (1, 3):
        with pytest.raises(BadRequest, match="each rank of the layout once"):
            check(layout=staged, ranks=ranks(count))


def test_layers_in_another_order_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="plane_order"):
        check(layout=msgspec.structs.replace(LAYOUT, plane_order="another"))


def test_a_send_that_fits_is_taken() -> None:
    check()
    check(sample=True)
    check(begin=20, end=30)
