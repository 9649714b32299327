"""Images in prompts: what they are named by, and what is refused of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.scheduling.plugin import block_hashes
from tercet.protocol import BadRequest, MultiModalFeature, Request, cache_key, digest_of_feature, digest_of_features
from tercet.protocol.content import require_placed, whole_features
from tercet.protocol.wire import PrepRecvCall, StartGenerateCall, decode_call

SIZE = 4


def feature(data: bytes = b"cat", offset: int = 2, length: int = 5, embeds: bytes = b"") -> MultiModalFeature:
    digest = digest_of_feature("image", length, embeds, data)
    return MultiModalFeature(
        modality="image", digest=digest, offset=offset, length=length, embeds=embeds, data=data
    )  # fmt: skip


def hashes(*features: MultiModalFeature) -> list[int]:
    return block_hashes(Request(seq_id="r", prompt=tuple(range(16)), mm_features=features), SIZE)


def shared(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def test_blocks_of_another_picture_are_others_from_where_it_begins() -> None:
    assert shared(hashes(feature(offset=6)), hashes(feature(b"dog", offset=6))) == 1
    assert shared(hashes(feature(offset=6)), hashes()) == 1
    assert shared(hashes(feature(offset=4)), hashes(feature(offset=5))) == 1
    assert shared(hashes(feature(offset=2)), hashes(feature(offset=2), feature(b"dog", offset=9))) == 2
    assert hashes(feature()) == hashes(feature().without_data())


@pytest.mark.processes
def test_a_picture_names_the_same_blocks_in_every_process() -> None:
    code = "from tests.unit.test_multimodal import *; print(hashes(feature()))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode().strip() == str(hashes(feature()))


def test_keys_of_pictures_stand_for_nothing_else() -> None:
    one, other = digest_of_features([feature()]), digest_of_features([feature(b"dog")])
    moved = digest_of_features([feature(offset=3)])
    keys = {
        cache_key(salt, adapter, digest)
        for salt in (None, "s", f"\0m64:{one}", f"\0m64:{one}s")
        for adapter in ("", "a")
        for digest in ("", one, other, moved)
    }
    assert len(keys) == 4 * 2 * 4
    assert digest_of_features([]) == ""
    assert cache_key("s") == "s"


def test_a_digest_is_of_the_data() -> None:
    feature().require_genuine()
    with pytest.raises(BadRequest, match="data: is missing"):
        feature().without_data().require_genuine()
    for change in ({"data": b"dog"}, {"modality": "audio"}, {"length": 6}, {"embeds": bytes(5)}):
        with pytest.raises(BadRequest, match="does not match the data"):
            msgspec.structs.replace(feature(), **change).require_genuine()


@pytest.mark.parametrize(
    "features",
    [
        [feature(offset=12)],
        [feature(), feature(offset=6)],
        [feature(offset=8), feature(offset=1)],
        [feature(embeds=b"\1\0\1")],
        [feature(embeds=b"\1\0\1\2\1")],
    ],
)
def test_what_does_not_fit_the_prompt_is_refused(features: list[MultiModalFeature]) -> None:
    with pytest.raises(BadRequest) as refused:
        require_placed(features, 16)
    assert refused.value.param == "mm_features"


def test_what_fits_the_prompt_is_taken() -> None:
    require_placed([feature(offset=0), feature(offset=5, embeds=b"\0\1\1\1\0"), feature(offset=11)], 16)


@pytest.mark.parametrize(("end", "computed"), [(1, 1), (2, 2), (3, 7), (6, 7), (7, 7), (8, 8), (10, 14), (16, 16)])
def test_no_picture_is_cut(end: int, computed: int) -> None:
    assert whole_features([feature(offset=2), feature(offset=9)], end) == computed


def test_a_call_carries_features() -> None:
    call = StartGenerateCall(prompt=list(range(16)), seq_id="s", mm_features=(feature(embeds=b"\0\1\1\1\0"),))
    assert decode_call(msgspec.json.encode(call), StartGenerateCall) == call


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": "x" * 64}, {"digest": "a" * 63}, {"digest": "a" * 64 + "\n"}, {"modality": ""}, {"offset": -1},
        {"offset": 2**31}, {"length": 0}, {"length": "5"}, {"data": "not base64!"}, {"embeds": 5}, {"more": 1},
    ],
)  # fmt: skip
def test_wrong_features_are_refused_by_name(wrong: dict[str, Any]) -> None:
    given = msgspec.to_builtins(feature()) | wrong
    body = msgspec.json.encode({"prompt": [1], "seq_id": "s", "mm_features": [given]})
    with pytest.raises(BadRequest):
        decode_call(body, PrepRecvCall)


PLAIN = st.none() | st.integers() | st.text() | st.dictionaries(st.text(), st.text())


@given(PLAIN | st.lists(PLAIN, min_size=1))
def test_garbage_is_refused(garbage: Any) -> None:
    body = msgspec.json.encode({"prompt": [1], "seq_id": "s", "mm_features": garbage})
    with pytest.raises(BadRequest):
        decode_call(body, PrepRecvCall)
