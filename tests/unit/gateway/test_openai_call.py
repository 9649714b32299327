"""Which requests generate, by the router's table, and what is known of bodies in forms of their own."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from tercet.protocol import BadRequest
from tercet.protocol.headers import GENERATING, POOLING, path_of
from tercet_gateway.openai_call import READ_STRICTLY, ByCharacters, OpenAICall, call_of

from .pickers import House

HI = {"role": "user", "content": "hi"}
OTHERS = sorted(GENERATING - READ_STRICTLY)


def posted(path: str, fields: Any) -> OpenAICall:
    body = fields if isinstance(fields, bytes) else msgspec.json.encode(fields)
    return call_of({":method": "POST", ":path": path}, body)


@pytest.mark.parametrize("path", sorted(GENERATING))
def test_all_that_generates_is_known_however_it_is_written(path: str) -> None:
    everything = "".join(f"%{byte:02x}" for byte in path.encode())
    for written in (path, f"{path}?a=/b%2Fc", path[0] + quote(path[1:], safe=""), everything, f"/{everything[3:]}?"):
        call = posted(written, {"prompt": "x" * 40, "messages": None})
        assert (call.path, call.generates) == (path, True), written


@pytest.mark.parametrize(
    "written", ["/v1/models", "/v1/chat%252Fcompletions", "/v1//completions", "/v1/completions/", "//v1/completions",
                "*", "/v1/completions%3Fx", *sorted(POOLING)]
)  # fmt: skip
def test_what_no_server_takes_for_it_does_not_generate(written: str) -> None:
    assert not posted(written, {}).generates


def test_paths_are_decoded_once_and_end_at_the_query() -> None:
    assert path_of("/a%2Fb%25%3f?c%20#d") == "/a/b%?"
    assert path_of("/%c3%a9%ff") == "/é\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_the_picker_counts_all_of_them(path: str) -> None:
    house = House("both", "both")
    written = "/" + quote(path[1:], safe="")
    picks = [(await house.picker.pick(posted(written, {"prompt": str(n)}))).decode[0] for n in range(4)]
    assert len({*picks}) == 2, "a burst is spread before any report"


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [("/v1/messages", {"system": "be brief", "messages": [HI]}, b"system:\nbe brief\nuser:"),
     ("/v1/messages", {"system": [{"type": "text", "text": "be brief"}], "messages": [HI]},
      b"system:\nbe brief\nuser:"),
     ("/cohere/v2/chat", {"messages": [{"role": "user", "content": "hello there"}]}, b"user:\nhello there"),
     ("/invocations", {"prompt": "the quick brown fox"}, b"the quick brown fox")],
)  # fmt: skip
async def test_prompts_of_other_apis(path: str, fields: Any, text: bytes) -> None:
    call = posted(path, {"model": "m", "max_tokens": 7, "priority": 3, "cache_salt": "s", "user": "u", **fields})
    body = call.body
    assert (body.model, call.max_tokens, body.priority, body.cache_salt, body.user) == ("m", 7, 3, "s", "u")
    told = await ByCharacters().tokens(call)
    assert b"".join(each.to_bytes(4, "little") for each in told)[:16] == text[: len(told) * 4][:16]


async def test_tokens_that_are_given_are_the_prompt() -> None:
    call = posted("/inference/v1/generate", {"token_ids": [3, 1, 2], "sampling_params": {"max_tokens": 9}})
    assert (await ByCharacters().tokens(call), call.max_tokens) == ((3, 1, 2), 9)


@pytest.mark.slow
@pytest.mark.parametrize("path", OTHERS)
@pytest.mark.parametrize(
    "body",
    [{"messages": [[HI], [HI, HI]]}, {"query": "q", "items": ["a"]},
     {"state": {"a": [1]}, "questions": {}}, {"token_ids": "no"}, {"messages": 7, "model": ["m"], "priority": "high"},
     {"sampling_params": [], "max_tokens": {}}, [], b"", b"{", b"\xff\xfe{\0}\0", b"[" * 30_000],
)  # fmt: skip
async def test_what_an_engine_is_to_judge_is_picked_for(path: str, body: Any) -> None:
    call = posted(path, body)
    assert call.generates
    await House("both").picker.pick(call)


async def test_what_begins_alike_is_alike() -> None:
    first, second = [
        await ByCharacters().tokens(posted("/generative_scoring", {"query": "q" * 100, "items": [end]})) for end in "ab"
    ]
    assert len(first) > 25
    assert first[:25] == second[:25]


def test_a_body_of_the_three_is_read_as_before() -> None:
    with pytest.raises(BadRequest) as refused:
        posted("/v1%2Fcompletions", {"model": 7})
    assert refused.value.param == "model"


@pytest.mark.parametrize(("path", "splits"), [("/v1/messages", True), ("/inference/v1/generate", False)])
async def test_only_what_engines_split_is_split(path: str, splits: bool) -> None:
    house = House("prefill", "decode")
    picked = await house.picker.pick(posted(path, {"prompt": "x" * 40_000}))
    assert bool(picked.prefill) == splits
