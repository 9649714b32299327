"""Tokens without an engine: as the model's own library makes them, by segments, and by characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.gateway.openai_call import OpenAIBody, OpenAICall, call_of
from tercet.gateway.rendering import SEGMENT, ByCharacters, ModelRenderer
from tercet.protocol import BadRequest

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


def test_a_prompt(checkpoint: Path) -> None:
    assert ModelRenderer(checkpoint).tokens(call(prompt=TEXT[:700])) == encoded(checkpoint, TEXT[:700])


def test_a_chat(checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    expected = encoded(checkpoint, "<|user|>hi\n<|user|>the fox\n<|assistant|>")
    assert ModelRenderer(checkpoint).tokens(call(messages=messages)) == expected


def test_segments_are_cut_where_the_tokenizer_cuts(checkpoint: Path) -> None:
    text = TEXT[: 5 * SEGMENT]
    assert ModelRenderer(checkpoint, 10**9).tokens(call(prompt=text)) == encoded(checkpoint, text)


def test_a_longer_text_begins_as_the_shorter_one(checkpoint: Path) -> None:
    renderer = ModelRenderer(checkpoint, budget=SEGMENT)
    first = renderer.tokens(call(prompt=TEXT))
    assert first[:300] == encoded(checkpoint, TEXT)[:300]
    assert len(first) > 1000, "the rest is estimated, and not left out"
    again = [renderer.tokens(call(prompt=TEXT)) for _ in range(20)]  # each time one more segment is known
    assert again[-1] == encoded(checkpoint, TEXT)


def test_token_ids_are_taken_as_they_are(checkpoint: Path) -> None:
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        assert renderer.tokens(call(prompt=[5, 6, 7])) == (5, 6, 7)


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
def test_nothing_that_clients_send_is_too_much(checkpoint: Path, fields: dict[str, Any]) -> None:
    for renderer in (ModelRenderer(checkpoint), ByCharacters()):
        tokens = renderer.tokens(call(**fields))
        assert all(type(token) is int for token in tokens)


def test_fields_that_are_null_are_not_there(checkpoint: Path) -> None:
    """As vLLM takes them."""
    body = b'{"messages": [{"role": "user", "content": "hi there"}], "chat_template_kwargs": null, "tools": null}'
    null = call_of({":method": "POST", ":path": "/v1/chat/completions"}, body)
    plain = msgspec.structs.replace(null, body=OpenAIBody(messages=null.body.messages))
    assert ModelRenderer(checkpoint).tokens(null) == ModelRenderer(checkpoint).tokens(plain)


def test_characters_are_an_estimate_that_prefixes_agree_on() -> None:
    short, long = (ByCharacters().tokens(call(prompt=TEXT[:length])) for length in (400, 800))
    assert len(short) == 100
    assert long[:100] == short
    assert ByCharacters().tokens(call(prompt="another")) != ByCharacters().tokens(call(prompt="a mother"))


def test_templates_that_loop_and_complain(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('only users') if messages[0].role != 'user' }}{{ messages | tojson }}")
    renderer = ModelRenderer(tmp_path)
    assert renderer.tokens(call(messages=[{"role": "user"}])) == encoded(checkpoint, '[{"role": "user"}]')
    assert renderer.tokens(call(messages=[{"role": "tool", "content": "abcd"}]))
    template.write_text("{% for %}")
    with pytest.raises(BadRequest, match="chat template"):
        ModelRenderer(tmp_path)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"tokenizer\.json"):
        ModelRenderer(tmp_path)
