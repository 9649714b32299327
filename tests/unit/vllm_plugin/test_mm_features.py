"""Images between vLLM's form and ours, in the prefix cache and in leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.renderers.base import BaseRenderer

from tercet.engine.interface import Adapter, KeyedPrompt, ModelLimits
from tercet.protocol import (
    BadRequest,
    KVAddrInfo,
    MultiModalFeature,
    RankAddress,
    cache_key,
    content_of,
    digest_of_feature,
    digest_of_features,
    packed,
)
from tercet.protocol.names import LONGEST_KEPT
from tercet.protocol.wire import (
    JSON,
    MSGPACK,
    PrepRecvCall,
    RemoteSendCall,
    StartGenerateCall,
    decode_call,
    encode_call,
)
from tercet.router.openai import program_client
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.edge import llm_requests
from tercet.vllm_plugin.edge.llm_requests import LLMRequest
from tercet.vllm_plugin.mm_features import bound_uuids, to_prompt, to_specs, to_wire
from tests.longest_wait import LONGEST_WAIT_S, until

from .tiny_engine import BLOCK, LAYOUT, TinyEngine, crossed, tokens_of

INFO = KVAddrInfo("f" * 32, "d", 0, 16, "tcp", (RankAddress(0, ("tcp://127.0.0.1:1",)),), LAYOUT)
MASK = torch.tensor([False, True, True, False])


def spec(value: float, offset: int = 3, mask: torch.Tensor | None = MASK, length: int = 4) -> MultiModalFeatureSpec:
    pixels = torch.full((2, 3), value)
    item = MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())})
    return MultiModalFeatureSpec(item, "image", "vllms", PlaceholderRange(offset, length, mask), "vllms")


def test_a_feature_goes_there_and_back() -> None:
    ours = to_wire(spec(1.5))
    ours.require_genuine()
    prompt: Any = to_prompt(tokens_of(20), [ours, to_wire(spec(2.5, offset=9, mask=None))], "salt", torch.bfloat16)
    first, second = prompt["mm_kwargs"]["image"]
    assert torch.equal(first["pixel_values"].data, torch.full((2, 3), 1.5, dtype=torch.bfloat16))
    assert torch.equal(second["pixel_values"].data, torch.full((2, 3), 2.5, dtype=torch.bfloat16))
    assert first["pixel_values"].field == MultiModalBatchedField()
    assert prompt["mm_placeholders"]["image"] == [PlaceholderRange(3, 4, MASK), PlaceholderRange(9, 4)]
    assert prompt["mm_hashes"]["image"][0] == ours.digest
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == (tokens_of(20), "salt")


def test_digests_are_of_what_the_model_is_given() -> None:
    assert to_wire(spec(1.5)).digest == to_wire(spec(1.5, offset=8)).digest
    others = [to_wire(each).digest for each in (spec(1.5), spec(2.5), spec(1.5, mask=None), spec(1.5, mask=~MASK))]
    assert len(set(others)) == len(others)


def test_names_of_clients_are_bounded_before_vllm_keeps_them() -> None:
    """The real function of vLLM's renderer, without a model: it passes on the names that requests give."""
    config = SimpleNamespace(multimodal_config=None)
    renderer: Any = SimpleNamespace(model_config=config, _validate_mm_uuids=lambda *_: None)
    renderer._process_mm_uuids = MethodType(BaseRenderer._process_mm_uuids, renderer)
    bound_uuids(renderer)
    given = {"image": ["short", None, "n" * 4_000_000, "n" * 3_999_999], "audio": None}
    found = renderer._process_mm_uuids({}, {}, given, "request")
    short, absent, *long = found["image"]
    assert (short, absent, found["audio"]) == ("short", None, None)
    assert len({*long}) == 2
    assert max(map(len, long)) <= LONGEST_KEPT


def spec_of(pixels: torch.Tensor) -> MultiModalFeatureSpec:
    grid = MultiModalFieldElem(torch.tensor([1, 4, 6]), MultiModalBatchedField())
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField()), "image_grid_thw": grid}
    )
    return MultiModalFeatureSpec(item, "image", "vllms", PlaceholderRange(0, 4), "vllms")


@settings(deadline=None)
@given(numbers=st.lists(st.floats(width=32), min_size=1, max_size=40), name=st.sampled_from(["bfloat16", "float16"]))
def test_a_model_is_given_the_same_wherever_its_tensors_are_cast(numbers: list[float], name: str) -> None:
    """Cast at the router they take half the bytes, and no other digest than at another router."""
    pixels, dtype = torch.tensor(numbers), getattr(torch, name)
    precise, short = to_wire(spec_of(pixels)), to_wire(spec_of(pixels), name)
    assert precise == to_wire(spec_of(pixels), "float32") == to_wire(spec_of(pixels), "float64")
    assert short == to_wire(spec_of(pixels.clone()), name)
    assert short.digest != precise.digest
    assert len(precise.data) - len(short.data) >= 2 * len(numbers) - 1  # its name may be longer by a letter
    for feature in (precise, short):
        prompt: Any = to_prompt(tokens_of(9), [feature], None, dtype)
        (item,) = prompt["mm_kwargs"]["image"]
        assert item["pixel_values"].data.dtype == dtype
        assert item["pixel_values"].data.view(torch.int16).equal(pixels.to(dtype).view(torch.int16))
        assert item["image_grid_thw"].data.equal(torch.tensor([1, 4, 6]))


def test_what_the_processor_keeps_stays_as_it_was() -> None:
    kept = spec(1.5)
    to_wire(kept, "bfloat16")
    assert kept.data is not None
    assert kept.data["pixel_values"].data.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [PrepRecvCall, RemoteSendCall, StartGenerateCall])
def test_calls_with_tensors_are_packed(kind: Any) -> None:
    needed: dict[str, Any] = {"kv_addr_info": INFO, "begin": 0} if kind is RemoteSendCall else {}
    features = (to_wire(spec(1.5)),)
    call = kind(prompt=[1, 2], seq_id="s", mm_features=features, **needed)
    body, content_type = encode_call(call)
    assert content_type == MSGPACK
    assert len(body) < len(msgspec.json.encode(call))
    assert decode_call(body, kind, content_type) == call
    named = kind(prompt=[1, 2], seq_id="s", mm_features=tuple(each.without_data() for each in features), **needed)
    body, content_type = encode_call(named)
    assert (content_type, decode_call(body, kind)) == (JSON, named)


@given(garbage=st.binary(max_size=200))
def test_a_packed_call_that_is_none_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_call(garbage, StartGenerateCall, f"{MSGPACK}; charset=x")
    packed_call = msgspec.msgpack.encode({"prompt": [-1], "seq_id": "s"})
    with pytest.raises(BadRequest, match="prompt"):
        decode_call(packed_call, StartGenerateCall, MSGPACK)


def test_a_feature_whose_tensors_are_elsewhere_is_an_error() -> None:
    gone = MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(0, 4), "x")
    with pytest.raises(ValueError, match="missing"):
        to_wire(gone)


def test_features_behind_the_prompt_are_left_out() -> None:
    features = [to_wire(spec(1.5)), to_wire(spec(2.5, offset=9))]
    assert len(to_prompt(tokens_of(9), features, None, torch.float32)["mm_kwargs"]["image"]) == 1
    assert len(to_specs(features, 9)) == 1
    assert len(to_specs(features, 10)) == 2


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_garbage_in_the_place_of_tensors_is_refused(data: st.DataObject) -> None:
    genuine = bytearray(to_wire(spec(1.5)).data)
    for _ in range(data.draw(st.integers(1, 4))):
        genuine[data.draw(st.integers(0, len(genuine) - 1))] = data.draw(st.integers(0, 255))
    garbage = bytes(data.draw(st.just(genuine) | st.binary(min_size=1, max_size=50)))
    digest = digest_of_feature("image", 4, b"", garbage)
    feature = MultiModalFeature(modality="image", digest=digest, offset=0, length=4, data=garbage)
    with suppress(BadRequest):
        prompt: Any = to_prompt(tokens_of(9), [feature], None, torch.float32)
        assert isinstance(prompt["mm_kwargs"]["image"][0], MultiModalKwargsItem)


@pytest.mark.parametrize(
    ("modality", "count", "adapter", "said"),
    [
        ("image", 3, None, "accepts at most 2 in a prompt"),
        ("audio", 1, None, "does not accept audio"),
        ("image", 1, "a", "adapters"),
    ],
)
def test_what_the_model_does_not_take_is_refused(modality: str, count: int, adapter: str | None, said: str) -> None:
    limits = ModelLimits(100, 1000, {"image": 2}, adapters_change_features=True)
    one = msgspec.structs.replace(to_wire(spec(1.0, offset=0)), modality=modality)
    features = [msgspec.structs.replace(one, offset=4 * number) for number in range(count)]
    with pytest.raises(BadRequest, match=said):
        limits.check_features(tokens_of(50), features, adapter)
    limits.check_features(tokens_of(50), [], "a")
    with pytest.raises(BadRequest, match="does not accept image"):
        ModelLimits(100, 1000).check_features(tokens_of(50), [to_wire(spec(1.0))], None)


# ---- beside the event loop ---------------------------------------------------------------------------------------


class Gate:
    """What coding calls: it waits in its thread until the event loop has opened it."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(LONGEST_WAIT_S), "the event loop stands still"
        return to_wire(spec(1.5))


async def entered(gate: Gate) -> None:
    await until(lambda: gate.entered.is_set())


async def test_the_loop_goes_on_while_a_router_codes_images(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(program_client, "to_wire", gate)
    request: Any = SimpleNamespace(mm_features=[spec(1.5)])
    coding = asyncio.create_task(program_client.features_of(request))
    await entered(gate)
    gate.opened.set()
    assert await coding == (to_wire(spec(1.5)),)
    request.mm_features = None
    assert await program_client.features_of(request) == ()


async def test_tensors_that_are_elsewhere_are_a_clients_error() -> None:
    request: Any = SimpleNamespace(mm_features=[to_specs([to_wire(spec(1.5))], 9)[0]])
    with pytest.raises(VLLMValidationError, match="missing"):
        await program_client.features_of(request)


@pytest.mark.parametrize("aborted", [False, True])
async def test_the_loop_goes_on_while_an_engine_reads_images(monkeypatch: pytest.MonkeyPatch, aborted: bool) -> None:
    """And what is aborted meanwhile does not begin."""
    gate, begun = Gate(), list[Any]()

    async def generate(prompt: Any, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        begun.append(prompt)
        yield SimpleNamespace(
            num_cached_tokens=0, prompt_logprobs=None,
            outputs=[SimpleNamespace(token_ids=[7], finish_reason="stop", stop_reason=None, logprobs=None)],
        )  # fmt: skip

    async def abort(_: str) -> None:
        pass

    model = SimpleNamespace(dtype=torch.float32)
    client: Any = SimpleNamespace(
        generate=generate, abort=abort, vllm_config=SimpleNamespace(model_config=model)
    )  # fmt: skip
    monkeypatch.setattr(llm_requests, "to_prompt", gate)
    request = LLMRequest(client, KeyedPrompt([1] * 9), {}, TercetParams("token"), features=[to_wire(spec(1.5))])
    stream = request.outputs()
    first = asyncio.ensure_future(anext(stream))
    await entered(gate)
    if aborted:
        request.abort()
    gate.opened.set()
    assert (await first).finish_reason == ("abort" if aborted else "stop")
    assert len(begun) == (not aborted)
    await stream.aclose()


# ---- in the prefix cache and in leases --------------------------------------------------------------------------


def names(value: float, offset: int = 3) -> tuple[MultiModalFeature, ...]:
    return (to_wire(spec(value, offset, None, 2 * BLOCK)).without_data(),)


def reserve(engine: TinyEngine, lease: str, features: tuple[MultiModalFeature, ...]) -> int:
    """Reserve, with all that crosses to the core packed as it is on the way there; how much was cached."""
    args = crossed((lease, KeyedPrompt(tokens_of(4 * BLOCK), features=features)))
    answer = core_methods.answering(core_methods.reserve)(engine.core, *args)
    core_methods.give_up(engine.core, lease)
    found, error = answer.result(0)
    assert error is None
    return found.matched_len


def test_kv_of_another_picture_is_not_found(engine: TinyEngine) -> None:
    assert reserve(engine, "a", names(1.0)) == 0
    core_methods.release(engine.core, "a", 4 * BLOCK)
    assert reserve(engine, "b", names(2.0)) == 0
    assert reserve(engine, "c", ()) == 0
    assert reserve(engine, "d", names(1.0, offset=BLOCK)) == 0
    assert reserve(engine, "e", names(1.0)) == 4 * BLOCK
    core_methods.release(engine.core, "d", 4 * BLOCK)
    assert reserve(engine, "f", names(2.0, offset=BLOCK)) == BLOCK
    for lease in "bcef":
        core_methods.release(engine.core, lease, 0)


def test_a_lease_is_extended_for_the_same_picture_only(engine: TinyEngine) -> None:
    reserve(engine, "a", names(1.0))
    longer = tokens_of(5 * BLOCK)
    with pytest.raises(BadRequest):
        core_methods.extend(engine.core, "a", KeyedPrompt(longer, features=names(2.0)))
    core_methods.extend(engine.core, "a", KeyedPrompt(longer, features=names(1.0)))
    core_methods.release(engine.core, "a", 0)


# The record of a prompt and everything else that its KV depends on.

ADAPTER = Adapter("a", 1, "/a", "d" * 64)
FEATURES = (MultiModalFeature(modality="image", digest="e" * 64, offset=3, length=4),)
PROMPT = KeyedPrompt(tokens_of(40), "salt", ADAPTER, FEATURES)


def test_its_key_is_of_salt_adapter_and_images() -> None:
    assert PROMPT.key == cache_key("salt", ADAPTER.digest, digest_of_features(FEATURES))
    assert KeyedPrompt([1], "salt").key == "salt"
    assert KeyedPrompt([1]).key is None


def test_a_part_has_the_same_key_and_the_content_of_its_tokens() -> None:
    assert PROMPT.first(16).tokens == tokens_of(16)
    assert PROMPT.with_output([7, 8]).tokens == [*tokens_of(40), 7, 8]
    assert {PROMPT.first(16).key, PROMPT.with_output([7]).key} == {PROMPT.key}
    assert PROMPT.content(16) == PROMPT.first(16).content(16) == content_of(packed(tokens_of(16)), PROMPT.key)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"tokens": [1]}, ""),
        ({"salt": None}, "cache_salt"),
        ({"adapter": msgspec.structs.replace(ADAPTER, digest="f" * 64)}, "adapter"),
        ({"adapter": None}, "adapter"),
        ({"features": ()}, "mm_features"),
    ],
)
def test_what_differs_is_named_as_calls_name_it(changed: dict[str, Any], field: str) -> None:
    other = msgspec.structs.replace(PROMPT, **changed)
    assert PROMPT.difference(other) == other.difference(PROMPT) == field


def test_an_empty_salt_is_none() -> None:
    assert KeyedPrompt([1], "").difference(KeyedPrompt([1])) == ""


def test_the_core_gets_it_without_names_of_fields_and_without_the_key() -> None:
    assert PROMPT.key
    sent = crossed(PROMPT)
    assert isinstance(sent, list)
    assert len(sent) == 4
    assert msgspec.convert(sent, KeyedPrompt) == PROMPT
