"""The contexts that a fleet wants most, and which of them are copied when an engine comes or goes. Without I/O.

:class:`WantedContexts` keeps the blocks of recent prompts, each under the hash of all before it::

    prompts   A B C, A B D, A B D      uses at the ends of prompts    C 1, D 2
                                       wanted                         A 3, B 3, D 2, C 1

A block is wanted as often as the prompts that go on after it, so the most wanted blocks are beginnings of prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tercet.decisions.scheduling.plugin import block_hashes
from tercet.protocol import Request
from tercet.protocol.content import packed, unpacked

BLOCK = 64
"""Tokens of a block."""
MOST_TOKENS = 2**20
LONGEST = 2**15
"""Tokens of one prompt that count: its beginning."""
HALF_LIFE_S = 600.0
"""Seconds after which a use counts half."""
LEAST_PATIENCE_S = 0.5
NEARLY = 0.9


class _Root(NamedTuple):
    """What the KV of a prompt depends on, except its tokens."""

    salt: str | None
    adapter: str | None
    adapter_digest: str


class _Block:
    """A block ``tokens`` up to position ``end`` after the block ``parent``; ``uses`` are prompts that ended here."""

    __slots__ = ("at", "end", "parent", "root", "tokens", "uses")

    def __init__(self, parent: int | None, end: int, tokens: bytes, root: _Root) -> None:
        self.parent, self.end, self.tokens, self.root = parent, end, tokens, root
        self.uses, self.at = 0.0, 0.0

    def uses_at(self, now: float) -> float:
        return self.uses * 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)

    def used(self, uses: float, at: float) -> None:
        now = max(self.at, at)
        self.uses = self.uses_at(now) + uses * 0.5 ** ((now - at) / HALF_LIFE_S)
        self.at = now


class Wanted(NamedTuple):
    """The beginning of a prompt up to its block ``last``, which is ``end`` tokens."""

    last: int
    end: int


class WantedContexts:
    """The blocks of recent prompts, at most ``most_tokens``; what was used least recently is forgotten first.

    A block that is forgotten leaves its uses to the block before it. Times are seconds of one clock.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens // BLOCK
        # The beginning of a prompt is used after its end, so a block is forgotten before those that it follows.
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def asked(self, request: Request, now: float) -> None:
        """Count a use of a prompt: of its whole blocks before the first image."""
        images = request.mm_features
        limit = min(LONGEST, images[0].offset if images else LONGEST) // BLOCK
        blocks, hashes = self._blocks, block_hashes(request, BLOCK, min(limit, self._most))
        if not hashes:
            return
        # A block's hash covers all tokens before it, so the known blocks are the first ones: a search by halves.
        known = bisect_left(range(len(hashes)), True, key=lambda place: hashes[place] not in blocks)
        root = _Root(request.cache_salt, request.adapter, request.adapter_digest)
        for place in reversed(range(known, len(hashes))):
            begin = place * BLOCK
            parent = hashes[place - 1] if place else None
            tokens = packed(request.prompt[begin : begin + BLOCK])
            blocks[hashes[place]] = _Block(parent, begin + BLOCK, tokens, root)
        # From the last block to the first, so that the first is the newest: it is forgotten after all that follow it.
        deque(map(blocks.move_to_end, reversed(hashes[:known])), maxlen=0)
        # Only the last block is counted here; the sum over a prompt's blocks is made when it is asked for.
        blocks[hashes[-1]].used(1.0, now)
        while len(blocks) > self._most:
            _, gone = blocks.popitem(last=False)
            if gone.parent is not None and gone.uses:
                blocks[gone.parent].used(gone.uses, gone.at)

    def most_wanted(self, now: float, tokens: int = MOST_TOKENS) -> list[Wanted]:
        """Return the contexts of the most wanted blocks, together at most ``tokens``, the most wanted first.

        Contexts may begin alike; the first of these has what they share.
        """
        wanted = {name: block.uses_at(now) for name, block in self._blocks.items()}
        # The longest first: each block adds its uses to the one before it, which has then those of all that follow.
        for name in sorted(wanted, key=lambda name: -self._blocks[name].end):
            parent = self._blocks[name].parent
            if parent is not None:
                wanted[parent] += wanted[name]
        order = sorted(wanted, key=lambda name: (-wanted[name], self._blocks[name].end))[: tokens // BLOCK]
        # A chosen block is extended to the end of its most wanted continuation: one copy instead of one for each block.
        following = dict[int, int]()  # the most wanted chosen block after each
        for name in order:
            parent = self._blocks[name].parent
            if parent is not None:
                following.setdefault(parent, name)
        found, covered = list[Wanted](), set[int]()
        for name in order:
            if name in covered:
                continue
            last = name
            covered.add(last)
            while (after := following.get(last)) is not None:
                last = after
                covered.add(last)
            found.append(Wanted(last, self._blocks[last].end))
        return found

    def request(self, wanted: Wanted, seq_id: str) -> Request | None:
        """Return a request whose prompt is the context; None if it was forgotten meanwhile."""
        parts, name = deque[bytes](), wanted.last
        while (block := self._blocks.get(name)) is not None:
            parts.appendleft(block.tokens)
            if block.parent is None:
                tokens = tuple(unpacked(b"".join(parts)))
                salt, adapter, digest = block.root
                return Request(
                    seq_id=seq_id, prompt=tokens, cache_salt=salt, adapter=adapter, adapter_digest=digest
                )  # fmt: skip
            name = block.parent
        return None


class CopyPlan:
    """The bounds of the copies that one engine gets or gives: ``tokens``, the time ``until``, and who has failed."""

    def __init__(self, tokens: int, until: float) -> None:
        self._left, self._until = tokens, until
        self.failed = dict[str, str]()  # by name, the code of the error
        self.contexts = self.tokens = 0

    def is_over(self, now: float) -> bool:
        return self._left < BLOCK or now >= self._until

    def patience(self, now: float) -> float:
        """Return the seconds for the next copy: half of what is left, so that one that hangs does not take all."""
        left = max(0.0, self._until - now)
        return min(left, max(LEAST_PATIENCE_S, left / 2))

    def copied(self, tokens: int) -> None:
        self._left -= tokens
        self.tokens += tokens
        self.contexts += tokens > 0

    def source(
        self, own: int, end: int, holders: Mapping[str, int], stores: Collection[str], loads: Mapping[str, float]
    ) -> str | None:
        """Return who should send the first ``end`` tokens of a context to an engine that has ``own``; None if no one.

        ``holders`` are the tokens that others are believed to have. A store is asked before engines, which have other
        work, then the engine with the least load.
        """
        more = {name: min(has, end) for name, has in holders.items() if min(has, end) > own and name not in self.failed}
        if not more:
            return None
        # Of those that have nearly as much as the best: the last few blocks are not worth a busy sender.
        enough = own + NEARLY * (max(more.values()) - own)
        near = [name for name, has in more.items() if has >= enough]
        return min(near, key=lambda name: (name not in stores, loads.get(name, 0.0), -more[name], name))

    def destination(self, has: int, holders: Mapping[str, int], candidates: Sequence[str]) -> str | None:
        """Return which of the ``candidates`` should get ``has`` tokens of a context; None if one of them holds these.

        It is the one that holds the most of it, the first of equals.
        """
        able = [name for name in candidates if name not in self.failed]
        if not able or not has or any(holders.get(name, 0) >= has for name in able):
            return None
        return max(able, key=lambda name: holders.get(name, 0))
