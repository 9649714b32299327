"""Tokenizer, chat template and length of the built-in model, read from its GGUF file, for simulated fleets.

Neither torch nor transformers is imported, and no weights are converted.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tercet.protocol import TercetError

MAGIC = b"GGUF"
# Numbers by their type in the format; texts and lists have other types.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, LIST = 8, 9
NORMAL_TOKEN = 1
# Metadata stand at the start of the file; this model's take 2 MB.
MOST_METADATA = 32 * 1024 * 1024


class _Reader:
    """Reader of the values of a GGUF file's metadata, in their order."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        size = self.number("Q")
        self._at += size
        return self._content[self._at - size : self._at].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            item, count = self.number("I"), self.number("Q")
            return [self.value(item) for _ in range(count)]
        return self.number(NUMBERS[kind])


def read_metadata(file: Path) -> dict[str, Any]:
    """Return a GGUF file's metadata by name; raise :class:`~tercet.protocol.TercetError` for another format."""
    with file.open("rb") as opened:
        reader = _Reader(opened.read(MOST_METADATA))
    try:
        if reader.number("4s") != MAGIC:
            raise TercetError(f"{file} is not a GGUF file", "model")
        reader.number("I")  # the format's version
        reader.number("Q")  # tensors
        return {reader.text(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise TercetError(f"{file}: its metadata cannot be read: {error!r}", "model") from error


def write_tokenizer(weights: Path, destination: Path) -> None:
    """Write the tokenizer, chat template and length of the GGUF file ``weights`` into the directory ``destination``."""
    found = read_metadata(weights)
    tokens: list[str] = found["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in found["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = found["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind != NORMAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(destination / "tokenizer.json"), pretty=False)
    config = {"chat_template": found["tokenizer.chat_template"], "model_max_length": found["llama.context_length"]}
    (destination / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    length = {"max_position_embeddings": found["llama.context_length"]}
    (destination / "config.json").write_bytes(msgspec.json.encode(length))
