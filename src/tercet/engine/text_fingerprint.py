"""The identity of a model's text side: with another identity, the same token ids have other meanings.

Relies on tokenizers of ``transformers`` having ``get_vocab``, ``encode``, and ``chat_template``; inner tokenizers of
``tokenizers`` have their merges in ``to_str``. Missing parts are left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from tercet.protocol.addresses import TextFingerprint

logger = logging.getLogger(__name__)
# Texts on which normalizers, splitters and special tokens differ: their encodings distinguish tokenizers with the same
# vocabulary, whichever library or version they come from.
TRIED = (
    "The quick brown fox jumps over the lazy dog, isn't it?  1234567890 3.14159 -42e10",
    "\n\n\tdef f(x):\n        return x  \r\n",
    "\u00c7a fait d\u00e9j\u00e0 na\u00efve \uff26\uff35\uff2c\uff2c \ufb01 \u03a9 \u00df \u1e9e \u0130 \u0131 e\u0301",
    "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0e44\u0e17\u0e22",
    "\u00a0\u2003\u200b\ufeff \U0001f469\u200d\U0001f467 \U0001f388",
    " <s></s><|im_start|>user<|endoftext|>[INST] <unk> </think>",
    "UPPER lower MiXeD camelCaseWords snake_case_words http://example.org/a?b=c&d=%20 a@b.c",
)


_last: list[tuple[Any, TextFingerprint]] = []
"""The last tokenizer with its fingerprint: a process and those forked from it ask for the same one."""


def text_fingerprint(tokenizer: Any) -> TextFingerprint:
    """Return the fingerprint of the checkpoint's tokenizer and chat template; empty for missing or failing ones."""
    if not (_last and _last[0][0] is tokenizer):  # compared by identity: a tokenizer need not be hashable
        _last[:] = [(tokenizer, _computed(tokenizer))]
    return _last[0][1]


def _computed(tokenizer: Any) -> TextFingerprint:
    try:
        digest = hashlib.sha256()
        for part in _of_tokenizer(tokenizer):
            digest.update(b"%d:" % len(part) + part)
        template = getattr(tokenizer, "chat_template", None)
        return TextFingerprint(digest.hexdigest()[:16], _digest(template) if template else "")
    except Exception as error:  # a tokenizer is code of its model; its failures must not keep the engine from starting
        logger.warning("this tokenizer cannot be compared with others: %s: %s", type(error).__name__, error)
        return TextFingerprint()


def _of_tokenizer(tokenizer: Any) -> Iterator[bytes]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    yield msgspec.json.encode(sorted((number, token) for token, number in vocabulary.items()))
    for text in TRIED:
        for special in (False, True):
            yield msgspec.json.encode(list(map(int, tokenizer.encode(text, add_special_tokens=special))))
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        yield msgspec.json.encode(_merges(backend.to_str()))


def _merges(said: str) -> list[list[str]]:
    """Return the pairs that become one token, in order; newer files have them as pairs, older ones as texts."""
    model = msgspec.json.decode(said).get("model", {})
    pairs: list[Any] = model.get("merges") or []
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in pairs]


def _digest(template: Any) -> str:
    said = template if isinstance(template, str) else msgspec.json.encode(template, order="sorted").decode()
    return hashlib.sha256(said.encode()).hexdigest()[:16]
