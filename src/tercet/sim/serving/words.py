"""Text for engines without a tokenizer: a word is a token, and a token is a word."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tercet.sim.tokens import VOCABULARY


def tokens_of(prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Token ids as they are; of text, one for each word."""
    if isinstance(prompt, str):
        return tuple(zlib.crc32(word.encode()) % VOCABULARY for word in prompt.split())
    return tuple(prompt)


def text_of(tokens: Sequence[int]) -> str:
    """What these tokens are called."""
    return "".join(f" w{token}" for token in tokens)
