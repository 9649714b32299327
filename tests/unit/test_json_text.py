"""One reader of what clients send: every encoding of Unicode, and nothing that no encoder can write."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tercet.protocol import BadRequest, json_text
from tercet.protocol.errors import writable
from tercet.protocol.json_text import in_utf8, read_json, unwritable_field
from tercet.protocol.names import LONGEST_ID, sequence_id
from tercet.protocol.wire import StartGenerateCall, decode_call, encode_call

SAID = {"model": "gr\u00f6\u00dfe", "n": [1, 2.5, None, True], "emoji": "\U0001f680"}
HALF = "\\ud83d"


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_every_encoding_of_unicode_says_the_same(encoding: str) -> None:
    text = in_utf8(json.dumps(SAID, ensure_ascii=False).encode(encoding))
    assert read_json(text) == SAID
    assert json.loads(text.decode()) == SAID


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (f'{{"user": "{HALF}"}}', "user"),
        (f'{{"user": "a{HALF}b"}}', "user"),
        ('{"user": "\\ude00"}', "user"),
        ('{"user": "\\ude00\\ud83d"}', "user"),
        (f'{{"messages": [{{"role": "user", "content": [{{"text": "{HALF}"}}]}}]}}', "messages[0].content[0].text"),
        (f'{{"metadata": {{"{HALF}": 1}}}}', "metadata.\\ud83d"),
        (f'{{"first": "fine", "stop": ["x", "{HALF}"], "last": "{HALF}"}}', "stop[1]"),
        (f'["{HALF}"]', "[0]"),
        ('{"temperature": NaN}', "temperature"),
        ('{"top_p": -Infinity}', "top_p"),
        ('{"top_p": 1e999}', "top_p"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_no_encoder_can_write_is_refused_by_its_fields_name(body: str, field: str, encoding: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(in_utf8(body.encode(encoding)))
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    "content", [b'{"user": "\xed\xa0\xbd"}', '{"user": "\ud83d"}'.encode("utf-16", "surrogatepass")]
)
def test_halves_that_are_no_escapes_are_found_as_well(content: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(in_utf8(content))
    assert caught.value.param == "user"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"no json", b'{"a": "\xff"}', b"\x00", b"\xff\xfe{", b"[" * 100_000, b"{}x"]
)
def test_what_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_json(in_utf8(content))
    assert caught.value.param is None


def test_in_a_very_long_text_no_field_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "MOST_EXPLAINED", 10)
    with pytest.raises(BadRequest, match="is not JSON") as caught:
        read_json(b'{"user": "\\ud83d"}')
    assert caught.value.param is None


def test_fields_that_cannot_be_written_are_found_in_values() -> None:
    assert unwritable_field({"a": ["fine", {"b": 1}]}) is None
    assert unwritable_field({"a": ["fine", {"b": "\ud83d"}]}) == "a[1].b"


@pytest.mark.parametrize("text", ["plain", "gr\u00f6\u00dfe", "\U0001f680"])
def test_text_stays(text: str) -> None:
    assert writable(text) == text


def test_errors_that_quote_what_cannot_be_written_can_be_written() -> None:
    wire = BadRequest("\ud83d: no", "x\ud83d").to_wire()
    assert msgspec.json.decode(msgspec.json.encode(wire))["error"]["message"] == "\\ud83d: no"


# ---- calls of engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"cache_salt": "\ud83d"}, "cache_salt"), ({"adapter": "\ud83d"}, "adapter"), ({"seq_id": "\ud83d"}, "seq_id"),
     ({"sampling_params": {"structured_outputs": {"json": {"\ud83d": 1}}}}, "sampling_params")],
)  # fmt: skip
def test_a_call_that_cannot_be_written_is_the_callers_error(fields: Any, named: str) -> None:
    given: dict[str, Any] = {"prompt": [1], "seq_id": "s", **fields}
    call = StartGenerateCall(**given)
    with pytest.raises(BadRequest) as caught:
        encode_call(call)
    assert caught.value.param == named


def test_a_call_may_come_in_any_encoding_and_names_text_that_is_none() -> None:
    body = '{"prompt": [1], "seq_id": "s"}'
    assert decode_call(body.encode("utf-16"), StartGenerateCall).seq_id == "s"
    assert decode_call(body.encode("utf-8-sig"), StartGenerateCall).seq_id == "s"
    with pytest.raises(BadRequest) as caught:
        decode_call(b'{"prompt": [1], "seq_id": "s", "cache_salt": "\\ud83d"}', StartGenerateCall)
    assert caught.value.param == "cache_salt"


# ---- ids -------------------------------------------------------------------------------------------------------------


def test_ids_of_clients_are_carried_as_they_are_while_they_can_be() -> None:
    assert sequence_id("cmpl-gr\u00f6\u00dfe/1-0-abc") == "cmpl-gr\u00f6\u00dfe/1-0-abc"


@pytest.mark.parametrize("given", ["x" * 300, "x" * 100_000, "a\nERROR forged", "\x1b[31m", "\u2028", "\ud83d"])
def test_other_ids_are_bounded_and_differ_where_their_requests_do(given: str) -> None:
    named = sequence_id(given)
    assert len(named) <= LONGEST_ID
    assert named.isprintable()
    assert named == sequence_id(given)
    assert named != sequence_id(given + "2")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"priority": 10**30}, "priority"),
        ({"a": [1, {"b": -(2**63) - 1}]}, "a[1].b"),
        ({"a": [2**64]}, "a[0]"),
        ({"a": [2**64 - 1, -(2**63), True]}, None),
    ],
)
def test_a_number_that_no_message_can_carry_is_named(value: Any, field: str | None) -> None:
    assert unwritable_field(value) == field


@pytest.mark.parametrize("digits", [5000, 400_000])
@pytest.mark.parametrize("sign", [b"", b"-"])
def test_a_number_of_many_digits_is_refused_by_its_field(digits: int, sign: bytes) -> None:
    with pytest.raises(BadRequest, match="number") as refused:
        read_json(b'{"a": {"seed": [1, ' + sign + b"9" * digits + b"]}}")
    assert refused.value.param == "a.seed[1]"
