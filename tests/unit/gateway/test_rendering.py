"""Tokens without an engine: as the model's own library makes them, by model_renderer, and by characters."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.protocol import BadRequest, RequestTooLarge
from tercet_gateway import model_renderer
from tercet_gateway.exchange import refusal
from tercet_gateway.model_renderer import SEGMENT, ModelRenderer
from tercet_gateway.openai_call import MOST_TOKENS, ByCharacters, OpenAIBody, OpenAICall, call_of, call_unread
from tests.longest_wait import LONGEST_WAIT_S

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog and goes on to the river where it sleeps, " * 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))
    return directory


def call(**fields: Any) -> OpenAICall:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return OpenAICall(path, {}, OpenAIBody(**fields))


def encoded(checkpoint: Path, text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids)


async def test_a_prompt(checkpoint: Path) -> None:
    assert await ModelRenderer(checkpoint).tokens(call(prompt=TEXT[:700])) == encoded(checkpoint, TEXT[:700])


async def test_a_chat(checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    expected = encoded(checkpoint, "<|user|>hi\n<|user|>the fox\n<|assistant|>")
    assert await ModelRenderer(checkpoint).tokens(call(messages=messages)) == expected


async def test_segments_are_cut_where_the_tokenizer_cuts(checkpoint: Path) -> None:
    text = TEXT[: 5 * SEGMENT]
    assert await ModelRenderer(checkpoint, 10**9).tokens(call(prompt=text)) == encoded(checkpoint, text)


async def test_a_longer_text_begins_as_the_shorter_one(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=SEGMENT)
    first = await renderer.tokens(call(prompt=TEXT))
    assert first[:300] == encoded(checkpoint, TEXT)[:300]
    assert len(first) > 1000, "the rest is estimated, and not left out"
    again = [await renderer.tokens(call(prompt=TEXT)) for _ in range(20)]  # each time one more segment is known
    assert again[-1] == encoded(checkpoint, TEXT)


async def test_what_was_too_much_is_learned_when_there_is_time(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=SEGMENT)
    await renderer.tokens(call(prompt=TEXT))
    learning = renderer.segments._learning
    assert learning is not None
    await asyncio.wait_for(learning, LONGEST_WAIT_S)
    assert await renderer.tokens(call(prompt=TEXT)) == encoded(checkpoint, TEXT)


async def test_what_is_remembered_takes_no_more_than_its_bound(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=10**9, most_bytes=50_000)
    for number in range(50):
        text = f"{number} {TEXT[number : number + 5000]}"
        assert len(await renderer.tokens(call(prompt=text))) > 100
        assert 0 < renderer.segments.bytes <= 50_000
    seen = renderer.segments._seen
    assert renderer.segments.bytes == sum(model_renderer._size(*item) for item in seen.items())
    held = sum(sys.getsizeof(key) + sys.getsizeof(key[0]) + sys.getsizeof(ids) for key, ids in seen.items())
    assert held + sys.getsizeof(seen) <= 1.1 * renderer.segments.bytes, "more is held than is counted"


async def test_others_are_served_while_a_long_prompt_is_tokenized(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=10**9)
    long = asyncio.create_task(renderer.tokens(call(prompt=TEXT * 40)))
    await asyncio.sleep(0)
    assert await renderer.tokens(call(prompt="short")) == encoded(checkpoint, "short")
    assert not long.done()
    assert len(await long) > 100_000


async def test_more_than_the_thread_can_take_is_estimated(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=10**9)
    texts = [f"{number} {TEXT * 4}" for number in range(4)]
    found = await asyncio.gather(*(renderer.tokens(call(prompt=text)) for text in texts))
    expected = [encoded(checkpoint, text) for text in texts]
    assert found[0] == expected[0]
    assert found[-1] != expected[-1]
    assert len(found[-1]) >= len(texts[-1]) // 4


@pytest.mark.parametrize("many", [1, 1000])
@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.nothing.at_all }}",
        "{{ raise_exception('no') }}",
        "{{ messages | tojson(1, 2, 3, 4) }}",
    ],
)
async def test_whatever_a_template_raises_the_prompt_is_estimated(
    checkpoint: Path, tmp_path: Path, template: str, many: int
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    asked = call(messages=[{"role": "user", "content": "four and more"}] * many)
    assert await ModelRenderer(tmp_path).tokens(asked) == await ByCharacters().tokens(asked)


@pytest.mark.parametrize("fatal", [AttributeError("x"), RecursionError(), MemoryError(), BaseException("a panic")])
async def test_whatever_a_tokenizer_raises_the_prompt_is_estimated(checkpoint: Path, fatal: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise fatal

    renderer = ModelRenderer(checkpoint)
    renderer.segments._tokenizer = cast("Any", SimpleNamespace(encode_batch_fast=fail))
    for asked in (call(prompt=TEXT), call(prompt="a few words")):
        assert await renderer.tokens(asked) == await ByCharacters().tokens(asked)


@pytest.mark.slow
async def test_nested_and_endless_messages_have_an_end(checkpoint: Path) -> None:
    nested: Any = "x"
    for _ in range(900):
        nested = [nested]
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        assert await renderer.tokens(call(messages=[{"role": "user", "content": nested}]))
        assert await renderer.tokens(call(prompt=nested)) is not None
        assert type(await renderer.tokens(call(messages=[{}] * 300_000))) is tuple
        assert len(await renderer.tokens(call(prompt=[7] * 200_000))) == 200_000


@pytest.mark.parametrize(
    "body", [b'{"prompt": [' + b"[]," * 100_000 + b"[]]}", b'{"messages": [' + b"{}," * 100_000 + b"{}]}"]
)
async def test_a_body_of_endless_lists_is_not_read(body: bytes) -> None:
    found = call_of({":method": "POST", ":path": "/v1/completions"}, body)
    assert (found.opening, found.size, found.body) == (body, len(body), OpenAIBody())


async def test_a_body_that_is_not_read_is_as_long_as_it_is_and_known_by_its_beginning(checkpoint: Path) -> None:
    one, other = ([b"a" * 2**20, b"b" * size] for size in (5_000_000, 6_000_000))
    headers = {":method": "POST", ":path": "/v1/completions"}
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        first, second = [await renderer.tokens(call_unread(headers, c, len(c[0] + c[1]))) for c in (one, other)]
        assert first[:16_384] == second[:16_384] == await ByCharacters().tokens(call(prompt="a" * 65_536))
        assert len(first) == min((2**20 + 5_000_000) // 4, MOST_TOKENS)


async def test_token_ids_are_taken_as_they_are(checkpoint: Path) -> None:
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        assert await renderer.tokens(call(prompt=[5, 6, 7])) == (5, 6, 7)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"content": None}]},
        {"messages": [], "tools": [{}]},
        {"prompt": ["a", "list", "of prompts"]},
        {"prompt": [1, "a"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ""},
        {"input": [{"role": "user", "content": "x"}], "instructions": "be brief"},
        {"input": "x"},
        {"prompt": "\ud800 half a character"},
        {},
    ],
)
async def test_nothing_that_clients_send_is_too_much(checkpoint: Path, fields: dict[str, Any]) -> None:
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        tokens = await renderer.tokens(call(**fields))
        assert all(type(token) is int for token in tokens)


async def test_fields_that_are_null_are_not_there(checkpoint: Path) -> None:
    """As vLLM takes them."""
    body = b'{"messages": [{"role": "user", "content": "hi there"}], "chat_template_kwargs": null, "tools": null}'
    null = call_of({":method": "POST", ":path": "/v1/chat/completions"}, body)
    plain = msgspec.structs.replace(null, body=OpenAIBody(messages=null.body.messages))
    assert await ModelRenderer(checkpoint).tokens(null) == await ModelRenderer(checkpoint).tokens(plain)


async def test_characters_are_an_estimate_that_prefixes_agree_on() -> None:
    short, long = [await ByCharacters().tokens(call(prompt=TEXT[:length])) for length in (400, 800)]
    assert len(short) == 100
    assert long[:100] == short
    assert await ByCharacters().tokens(call(prompt="another")) != await ByCharacters().tokens(call(prompt="a mother"))


async def test_templates_that_loop_and_complain(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('only users') if messages[0].role != 'user' }}{{ messages | tojson }}")
    renderer = ModelRenderer(tmp_path)
    assert await renderer.tokens(call(messages=[{"role": "user"}])) == encoded(checkpoint, '[{"role": "user"}]')
    assert await renderer.tokens(call(messages=[{"role": "tool", "content": "abcd"}]))
    template.write_text("{% for %}")
    with pytest.raises(BadRequest, match="chat template"):
        ModelRenderer(tmp_path)


async def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"tokenizer\.json"):
        ModelRenderer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1", "is not a tokenizer"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json cannot be read"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read"),
    ],
)
async def test_a_checkpoint_that_cannot_be_read_is_refused(
    checkpoint: Path, tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(BadRequest, match=says) as refused:
        ModelRenderer(tmp_path)
    assert refused.value.param == "render-model"


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [("/v1/completions", {"model": 7, "prompt": "a"}, "model"), ("/v1/completions", {"prompt": {}}, "prompt"),
     ("/v1/chat/completions", {"messages": ["hi"]}, "messages"), ("/v1/responses", {"input": 3}, "input"),
     ("/v1/completions", {"prompt": "a", "priority": 2**40}, "priority"), ("/v1/completions", [], None)],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_named(path: str, fields: object, name: str | None) -> None:
    with pytest.raises(BadRequest, match=path) as raised:
        call_of({":method": "POST", ":path": path}, msgspec.json.encode(fields))
    assert raised.value.param == name


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_a_body_is_read_in_every_encoding_that_engines_take(encoding: str) -> None:
    content = json.dumps({"model": "m", "prompt": "gr\u00f6\u00dfe", "priority": 3, "user": "ann"}).encode(encoding)
    found = call_of({":method": "POST", ":path": "/v1/completions"}, content).body
    assert (found.model, found.prompt, found.priority, found.user) == ("m", "gr\u00f6\u00dfe", 3, "ann")


@pytest.mark.parametrize(
    ("body", "field"),
    [(b'{"prompt": "\\ud83d"}', "prompt"), (b'{"prompt": "x", "request_id": "\\ud83d"}', "request_id"),
     (b'{"prompt": "x", "metadata": {"a": ["\xed\xa0\xbd"]}}', "metadata.a[0]"),
     (b'{"prompt": "x", "y": "\xff"}', None)],
)  # fmt: skip
def test_text_that_is_none_is_refused_in_every_field(body: bytes, field: str | None) -> None:
    with pytest.raises(BadRequest) as raised:
        call_of({":method": "POST", ":path": "/v1/completions"}, body)
    assert raised.value.param == field
    assert call_of({":method": "POST", ":path": "/v1/completions"}, b'{"prompt": "\\ud83d\\ude80"}').body.prompt


def test_a_refusal_has_the_form_of_the_api() -> None:
    said = refusal(RequestTooLarge("no"), "/v1/messages").immediate_response
    assert (said.status.code, json.loads(said.body)["error"]["type"]) == (413, "request_too_large")
    assert json.loads(refusal(RequestTooLarge("no")).immediate_response.body)["error"]["code"] == "request_too_large"
