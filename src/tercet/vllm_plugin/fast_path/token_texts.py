"""Look-up of the text of tokens that are whole characters, instead of decoding.

With a byte-level vocabulary, the text of a sequence is the bytes of its tokens, one after the other. A token whose
bytes are whole characters has the same text everywhere, unless the token before it left a character unfinished. vLLM's
detokenizer decodes all other tokens, and every token of other vocabularies.

Relies on ``FastIncrementalDetokenizer`` calling its own ``decode_next`` for the text of each token; on its stream
keeping back only an unfinished character, so that it can skip whole tokens; and on the ``ByteLevel`` decoder of
``tokenizers`` converting tokens to bytes one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import ByteLevel
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts(dict[int, str]):
    """The text of each token, filled on demand; empty for special tokens, parts of characters and unknown ids.

    ``backend`` is a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str:
        try:
            text = self._backend.decode([token_id], skip_special_tokens=True)
        except OverflowError:  # not a valid id
            return ""
        found = self[token_id] = "" if REPLACEMENT in text else text
        return found


def texts_of(tokenizer: Any) -> TokenTexts | None:
    """Return the texts of the tokens of vLLM's ``tokenizer``; None if a token's text depends on its neighbours."""
    backend = getattr(tokenizer, "_tokenizer", None)
    return TokenTexts(backend) if isinstance(getattr(backend, "decoder", None), ByteLevel) else None


def look_up(detokenizer: Any, texts: TokenTexts | None, prompt: Sequence[int]) -> Callable[[int], str] | None:
    """Make ``detokenizer`` look up texts; ``prompt`` has the tokens before its first one.

    Returns the function for the text of its next token. Returns None, and changes nothing, if look-up is impossible:
    for other detokenizers, and for texts with special tokens but without spaces between them.
    """
    if texts is None or type(detokenizer) is not FastIncrementalDetokenizer:
        return None
    if not detokenizer.spaces_between_special_tokens:
        return None
    decode, whole = detokenizer.decode_next, not prompt or bool(texts[prompt[-1]])

    def decode_next(next_token_id: int) -> str:
        nonlocal whole
        text = texts[next_token_id]
        if text and whole:
            return text
        whole = bool(text)  # after a token with text, no character is unfinished
        return decode(next_token_id)

    detokenizer.decode_next = decode_next
    return decode_next
