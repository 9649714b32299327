"""Ranges, errors and the wire format."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import (
    BadRequest,
    CacheGroup,
    EngineError,
    KVLayout,
    LayoutMismatch,
    NoSpace,
    TercetError,
    from_wire,
    resolve_range,
)
from tercet.protocol.types import resolve_end
from tercet.protocol.wire import PrepRecvCall, StartGenerateCall, decode_call

from .fakes import LAYOUT


@given(length=st.integers(1, 1000), end=st.none() | st.integers(-1100, 1100))
def test_end_is_a_slice_end_or_refused(length: int, end: int | None) -> None:
    expected = length if end is None else (end if end >= 0 else length + end)
    if 0 <= expected <= length:
        assert resolve_end(length, end) == expected == len(range(length)[:end])
    else:
        with pytest.raises(BadRequest) as raised:
            resolve_end(length, end)
        assert raised.value.param == "end"


@given(length=st.integers(1, 100), begin=st.integers(-10, 110), end=st.none() | st.integers(-110, 110))
def test_a_resolved_range_is_inside_and_not_empty(length: int, begin: int, end: int | None) -> None:
    resolved = None
    with contextlib.suppress(BadRequest):
        resolved = resolve_range(length, begin, end)
    if resolved is not None:
        assert 0 <= resolved[0] < resolved[1] <= length
    else:
        assert begin < 0 or not range(length)[begin:end] or (end or 0) > length


@pytest.mark.parametrize(
    "cls", [cls for cls in TercetError.__subclasses__() if cls.__module__ == TercetError.__module__]
)
def test_errors_cross_the_wire(cls: type[TercetError]) -> None:
    error = cls("what to do", "field")
    back = from_wire(error.status, msgspec.json.decode(msgspec.json.encode(error.to_wire())))
    assert type(back) is cls
    assert (back.message, back.param) == ("what to do", "field")


def test_codes_on_the_wire_stay_what_they_are() -> None:
    ours = [cls for cls in TercetError.__subclasses__() if cls.__module__ == TercetError.__module__]
    assert {cls.code: cls.status for cls in (TercetError, *ours)} == {
        "tercet_error": 500,
        "bad_request": 400,
        "unauthorized": 401,
        "forbidden": 403,
        "request_timeout": 408,
        "unsupported_media_type": 415,
        "head_too_large": 431,
        "unknown_adapter": 404,
        "unknown_engine": 404,
        "unknown_model": 404,
        "unknown_path": 404,
        "method_not_allowed": 405,
        "unknown_sequence": 404,
        "conflict": 409,
        "layout_mismatch": 409,
        "lease_ended": 410,
        "request_too_large": 413,
        "saturated": 429,
        "deadline_exceeded": 504,
        "shutting_down": 503,
        "no_space": 503,
        "grammars_busy": 503,
        "engine_error": 500,
        "program_failed": 500,
        "router_failed": 500,
        "transfer_failed": 502,
        "router_unreachable": 502,
        "engine_unreachable": 503,
        "role_unavailable": 503,
    }


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (500, {}, EngineError),
        (502, {"error": "text"}, EngineError),
        (404, {"error": {"message": "m", "code": "from_elsewhere"}}, BadRequest),
        (503, {"error": {"code": "no_space"}}, NoSpace),
    ],
)
def test_errors_of_others_become_ours(status: int, body: dict, cls: type[TercetError]) -> None:
    assert type(from_wire(status, body)) is cls


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_call(body, PrepRecvCall)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"seq_id": "a"}', "prompt"),
        (b'{"prompt": [1], "seq_id": "a", "extra": 1}', "extra"),
        (b'{"prompt": [1], "seq_id": 5}', "seq_id"),
        (b'{"prompt": [1], "seq_id": "a", "begin": "x"}', "begin"),
        (b'{"prompt": [1], "seq_id": "a", "output": [1, "x"]}', "output"),
    ],
)
def test_the_field_is_named(body: bytes, field: str) -> None:
    with pytest.raises(BadRequest) as raised:
        decode_call(body, StartGenerateCall)
    assert raised.value.param == field


# Engines that cut blocks or split layers otherwise than each other are mapped.
MAPPED = ("splits_by_head", "splits_by_token", "stages")


@pytest.mark.parametrize("field", [name for name in LAYOUT.__struct_fields__ if name not in MAPPED])
def test_a_mismatch_names_what_differs(field: str) -> None:
    value = getattr(LAYOUT, field)
    more = {int: 1, str: "x", tuple: (CacheGroup("sliding_window", 1, 8),)}[type(value)]
    other = msgspec.structs.replace(LAYOUT, **{field: value + more})
    with pytest.raises(LayoutMismatch, match=field):
        LAYOUT.require_mappable(other, "the other")
    LAYOUT.require_mappable(LAYOUT, "itself")


SPLITTABLE = msgspec.structs.replace(LAYOUT, num_kv_heads=8, splits_by_head=True, splits_by_token=True)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([16, 64, 128]))
def test_engines_that_cut_heads_and_tokens_otherwise_can_exchange_kv(ours: int, theirs: int, block_size: int) -> None:
    here, there = _split(ours, SPLITTABLE.block_size), _split(theirs, block_size)
    here.require_mappable(there, "the other")
    assert here.exchange_key == there.exchange_key


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"splits_by_head": False, "tp_size": 2, "block_bytes": LAYOUT.block_bytes // 2},
            "cannot be cut between heads",
        ),
        ({"splits_by_token": False, "block_size": LAYOUT.block_size * 2}, "block_size"),
    ],
)
def test_what_cannot_be_mapped_is_named(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        SPLITTABLE.require_mappable(msgspec.structs.replace(SPLITTABLE, **changed), "the other")


def test_degrees_of_which_neither_divides_the_other_are_named() -> None:
    here = _split(2, SPLITTABLE.block_size)
    with pytest.raises(LayoutMismatch, match="tp_size is 2 here and 3 on the other, and neither divides the other"):
        here.require_mappable(msgspec.structs.replace(here, tp_size=3), "the other")


def _split(tp_size: int, block_size: int) -> KVLayout:
    head_bytes = SPLITTABLE.block_bytes // SPLITTABLE.num_kv_heads * block_size // SPLITTABLE.block_size
    heads = max(1, SPLITTABLE.num_kv_heads // tp_size)
    return msgspec.structs.replace(
        SPLITTABLE, tp_size=tp_size, block_size=block_size, block_bytes=heads * head_bytes
    )  # fmt: skip
