"""A model's tokenizer as a workload's vocabulary, read without importing a model library where that is possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tercet.bench.workloads import Vocabulary
from tercet.protocol import BadRequest


class ModelVocabulary:
    """The tokenizer of a checkpoint's directory or of a hub id. Raises :class:`~tercet.protocol.BadRequest`."""

    def __init__(self, model: str) -> None:
        self.model = model
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer = _load(model)
        self._size = int(self._tokenizer.get_vocab_size(with_added_tokens=False))
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(added)

    @property
    def size(self) -> int:
        return self._size

    @property
    def special(self) -> frozenset[int]:
        return self._special

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def chat_overhead(model: str, vocabulary: Vocabulary) -> int:
    """Tokens that the model's chat template puts around a single message of a user."""
    from transformers import AutoTokenizer

    sample = "one two three"
    try:
        load = cast("Callable[..., Any]", AutoTokenizer.from_pretrained)  # pyright: ignore[reportUnknownMemberType]
        template = load(model, local_files_only=Path(model).exists())
        text = template.apply_chat_template(
            [{"role": "user", "content": sample}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # whatever a template or a tokenizer of any kind raises
        raise BadRequest(f"tokenizer: no chat template of {model}: {_first_line(error)}", "tokenizer") from error
    return len(vocabulary.encode(str(text))) - len(vocabulary.encode(sample))


def fit_text(vocabulary: Vocabulary, tokens: Sequence[int], length: int) -> str:
    """Text of exactly ``length`` tokens, as near to ``tokens`` as can be.

    Text and tokens do not map one to one: decoding and encoding again may change the count. It is mended at the end of
    the text, by dropping or adding tokens until the count is right.
    """
    text, kept = "", length
    for _ in range(8):
        text = vocabulary.decode(tokens[:kept]) if kept <= len(tokens) else text + " so" * (kept - len(tokens))
        excess = len(vocabulary.encode(text)) - length
        if excess == 0:
            return text
        kept = max(1, min(kept, len(tokens)) - excess)
    return text


def _load(model: str) -> Any:
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    load = cast("Callable[[str], Any]", Tokenizer.from_file if file.is_file() else Tokenizer.from_pretrained)
    if Path(model).exists() and not file.is_file():
        raise BadRequest(f"tokenizer: {model} has no tokenizer.json", "tokenizer")
    try:
        return load(str(file) if file.is_file() else model)
    except Exception as error:  # the library raises plain Exception
        raise BadRequest(f"tokenizer: cannot load {model}: {_first_line(error)}", "tokenizer") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
