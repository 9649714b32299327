"""The contents of blocks: names that are equal in every process, chained from the first block of a prompt.

A name covers all tokens up to the end of its block, the cache salt, the adapter's contents, and the images and other
features that begin before this end; features after it do not change the block's KV.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from tercet.engine.interface import KeyedPrompt, digest_of
from tercet.protocol import cache_key, packed
from tercet.protocol.content import DIGEST_BYTES, TOKEN_BYTES


class BlockContent(msgspec.Struct, frozen=True, array_like=True):
    """What a block has the KV of: its packed tokens, after those of the block ``parent``.

    ``parent`` is None for the first block of a prompt; only that block has the ``salt``, the ``adapter``'s name and the
    digest of its contents. ``features`` are the digests of images and the like in the block, each with the position of
    its first token from the block's first one.
    """

    name: bytes
    parent: bytes | None
    tokens: bytes
    features: tuple[tuple[str, int], ...] = ()
    salt: str | None = None
    adapter: str | None = None
    adapter_digest: str = ""

    @property
    def is_genuine(self) -> bool:
        """True if the name is the one that the contents have."""
        before = _root(self.salt, self.adapter_digest) if self.parent is None else self.parent
        return self.name == _name(before, self.tokens, self.features)


def contents_of(prompt: KeyedPrompt, block_size: int) -> list[BlockContent]:
    """Return the contents of a prompt's whole blocks, in order."""
    tokens, digest = packed(prompt.tokens), digest_of(prompt.adapter)
    found, before = list[BlockContent](), _root(prompt.salt, digest)
    for begin in range(0, len(prompt.tokens) // block_size * block_size, block_size):
        end = begin + block_size
        own = tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        inside = tuple(
            (each.digest, each.offset - begin) for each in prompt.features if each.offset < end and each.end > begin
        )
        name = _name(before, own, inside)
        if begin:
            found.append(BlockContent(name, before, own, inside))
        else:
            adapter = None if prompt.adapter is None else prompt.adapter.name
            found.append(BlockContent(name, None, own, inside, prompt.salt or None, adapter, digest))
        before = name
    return found


def _root(salt: str | None, adapter_digest: str) -> bytes:
    return blake2b((cache_key(salt, adapter_digest) or "").encode(), digest_size=DIGEST_BYTES).digest()


def _name(before: bytes, tokens: bytes, features: tuple[tuple[str, int], ...]) -> bytes:
    # The first two parts have fixed lengths, so no other contents have the same text.
    said = before + tokens + (repr(features).encode() if features else b"")
    return blake2b(said, digest_size=DIGEST_BYTES).digest()
