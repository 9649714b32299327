"""Tokenizers of transformers with another vocabulary, merges, normalizer or template have another fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tercet.protocol.addresses import TextFingerprint
from tercet.vllm_plugin.start import before_forks
from tercet.vllm_plugin.start.before_forks import text_fingerprint

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog and the cat sat on the mat"] * 5, trainer
    )
    return tokenizer.to_str()


def made(said: str, change: Change | None = None, template: str | None = TEMPLATE) -> Any:
    fields = json.loads(said)
    if change is not None:
        change(fields)
    backend = Tokenizer.from_str(json.dumps(fields))
    found: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found


def swap_words(fields: dict[str, Any]) -> None:
    vocabulary = fields["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def swap_merges(fields: dict[str, Any]) -> None:
    merges = fields["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def test_the_same_is_the_same_wherever_it_is_loaded(said: str, tmp_path: Path) -> None:
    first = text_fingerprint(made(said))
    assert first.tokenizer
    assert first.chat_template
    made(said).save_pretrained(tmp_path)
    loaded: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert text_fingerprint(loaded) == first
    loaded("a text", truncation=True, max_length=1)  # which its tokenizer remembers
    assert text_fingerprint(made(said)) == first  # so that the next call computes again
    assert text_fingerprint(loaded) == first


def test_one_tokenizer_is_read_once_and_needs_no_hash(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(said)
    monkeypatch.setattr(type(tokenizer), "__hash__", None)
    first = text_fingerprint(tokenizer)
    monkeypatch.setattr(before_forks, "_of_tokenizer", lambda _: pytest.fail("it was read again"))
    assert text_fingerprint(tokenizer) == first


@pytest.mark.parametrize(
    "change",
    [swap_words, swap_merges, lambda fields: fields["added_tokens"][0].update(content="<S>"),
     lambda fields: fields.update(normalizer={"type": "Lowercase"}),
     lambda fields: fields.update(normalizer={"type": "NFKC"}),
     lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True)],
)  # fmt: skip
def test_any_other_tokenizer_is_another_one(said: str, change: Change) -> None:
    ours, theirs = text_fingerprint(made(said)), text_fingerprint(made(said, change))
    assert theirs.tokenizer
    assert theirs.tokenizer != ours.tokenizer
    assert theirs.chat_template == ours.chat_template


def test_templates(said: str) -> None:
    ours = text_fingerprint(made(said))
    other = text_fingerprint(made(said, template=TEMPLATE + " "))
    assert ours.tokenizer == other.tokenizer
    assert ours.chat_template != other.chat_template
    assert text_fingerprint(made(said, template=None)).chat_template == ""


def test_a_tokenizer_that_cannot_be_asked_is_unknown() -> None:
    assert text_fingerprint(object()) == TextFingerprint()
