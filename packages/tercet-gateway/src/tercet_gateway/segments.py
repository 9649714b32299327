"""A tokenizer that caches segments of text, so that only the new part of a conversation costs time."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

from tokenizers import Tokenizer

from tercet_gateway.rendering import Tokens, stand_ins

logger = logging.getLogger("tercet.gateway")
SEGMENT = 2048
"""Number of characters that are tokenized, and cached, together."""
AT_ONCE = 2 * SEGMENT
"""Most new characters that are tokenized at once; a thread tokenizes more, while other requests are served."""
MOST_PENDING = 64 * SEGMENT
"""Most characters that may wait for the thread; beyond that, prompts are estimated."""
MOST_UNLEARNED = 2048 * SEGMENT
"""Most characters that wait to be tokenized later; the oldest are dropped first."""
LEARNED_TOGETHER = 2
PAUSE_SECONDS = 0.002
COSTS = 320
"""Bytes of a cached segment in addition to its text and its tokens: the objects that hold them."""
NICENESS = 10
Segment = tuple[str, bool]
"""A text, and whether special tokens are added."""


class SegmentTokenizer:
    """A tokenizer that handles about ``budget`` new characters of a text at once; the rest gets stand-ins for now.

    Segments use at most ``most_bytes`` bytes; the least recently used are dropped first.
    """

    def __init__(self, tokenizer: Tokenizer, budget: int, most_bytes: int) -> None:
        self.bytes = 0
        self._tokenizer = tokenizer
        self._budget = budget
        self._most_bytes = most_bytes
        self._seen: OrderedDict[Segment, Tokens] = OrderedDict()
        # One object for each token id, shared by all segments: a token takes 8 bytes in each of them.
        self._ids = list(range(tokenizer.get_vocab_size() + 1))
        self._pending = 0
        self._urgent = ThreadPoolExecutor(1, "tokens")
        self._patient = ThreadPoolExecutor(1, "later-tokens", initializer=_be_nice)
        self._unlearned: deque[Segment] = deque(maxlen=MOST_UNLEARNED // SEGMENT)
        self._learning: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop tokenizing in the background."""
        if self._learning is not None:
            self._learning.cancel()
        self._urgent.shutdown(wait=False, cancel_futures=True)
        self._patient.shutdown(wait=False, cancel_futures=True)

    async def tokens(self, text: str, add_special_tokens: bool) -> Tokens:
        """Return the text's tokens."""
        segments = list(_segments(text, add_special_tokens))
        known = [self._recall(segment) for segment in segments]
        new = [segment for segment, tokens in zip(segments, known, strict=True) if tokens is None]
        if new:
            now = self._affordable(new)
            self._learn_later(new[len(now) :])
            made = dict(zip(now, await self._encoded(now), strict=True)) if now else {}
            known = [made.get(s) if tokens is None else tokens for s, tokens in zip(segments, known, strict=True)]
        return _joined(segments, known)

    def _affordable(self, new: Sequence[Segment]) -> Sequence[Segment]:
        left = self._budget
        for place, (text, _) in enumerate(new):
            if left <= 0:
                return new[:place]
            left -= len(text)
        return new

    # ---- tokenizing ------------------------------------------------------------------------------------------

    async def _encoded(self, segments: Sequence[Segment]) -> Sequence[Tokens | None]:
        """Return the tokens of the segments; None for segments for which there is no time now."""
        characters = sum(len(text) for text, _ in segments)
        if characters <= AT_ONCE:
            return self._remembered(segments, self._encode(segments))
        if self._pending and self._pending + characters > MOST_PENDING:
            self._learn_later(segments)
            return [None] * len(segments)
        self._pending += characters
        try:
            loop = asyncio.get_running_loop()
            return self._remembered(segments, await loop.run_in_executor(self._urgent, self._encode, segments))
        finally:
            self._pending -= characters

    def _encode(self, segments: Sequence[Segment]) -> list[list[int]]:
        # Even one text is encoded as a batch: only for batches does the tokenizer let other threads run.
        texts = [text for text, special in segments if not special]
        plain = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else ())
        return [
            (self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0] if special else next(plain)).ids
            for text, special in segments
        ]

    def _learn_later(self, segments: Sequence[Segment]) -> None:
        self._unlearned += segments
        if self._unlearned and (self._learning is None or self._learning.done()):
            self._learning = asyncio.create_task(self._learn(), name="learning segments")

    async def _learn(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unlearned:
            while self._pending:  # requests that wait go first # noqa: ASYNC110
                await asyncio.sleep(PAUSE_SECONDS)
            some = [self._unlearned.popleft() for _ in range(min(LEARNED_TOGETHER, len(self._unlearned)))]
            missing = [segment for segment in dict.fromkeys(some) if segment not in self._seen]
            if missing:
                try:
                    self._remembered(missing, await loop.run_in_executor(self._patient, self._encode, missing))
                except Exception:  # a tokenizer may raise any error; all waiting prompts get it, and are estimated
                    logger.exception("a part of a prompt cannot be tokenized")

    # ---- remembering -----------------------------------------------------------------------------------------

    def _recall(self, segment: Segment) -> Tokens | None:
        tokens = self._seen.get(segment)
        if tokens is not None:
            self._seen.move_to_end(segment)
        return tokens

    def _remembered(self, segments: Sequence[Segment], encoded: Sequence[Sequence[int]]) -> Sequence[Tokens]:
        made = [self._shared(ids) for ids in encoded]
        for segment, tokens in zip(segments, made, strict=True):
            if segment not in self._seen:
                self._seen[segment] = tokens
                self.bytes += _size(segment, tokens)
        while self.bytes > self._most_bytes:
            self.bytes -= _size(*self._seen.popitem(last=False))
        return made

    def _shared(self, ids: Sequence[int]) -> Tokens:
        """Return the same numbers, as the shared objects."""
        if len(ids) < 2 or max(ids) >= len(self._ids):
            return tuple(ids)
        return itemgetter(*ids)(self._ids)


def _size(segment: Segment, tokens: Tokens) -> int:
    text = segment[0]
    return COSTS + len(text) * (1 if text.isascii() else 4) + 8 * len(tokens)


def _segments(text: str, add_special_tokens: bool) -> Iterator[Segment]:
    start, first = 0, add_special_tokens
    while start < len(text):
        end = _segment_end(text, start)
        yield text[start:end], first
        start, first = end, False


def _segment_end(text: str, start: int) -> int:
    """Return the end of a segment: before its last blank, where tokenizers cut anyway.

    It depends only on the text before it.
    """
    end = start + SEGMENT
    if end >= len(text):
        return len(text)
    blank = text.rfind(" ", start + SEGMENT // 2, end)
    return blank if blank > start else end


def _joined(segments: Sequence[Segment], known: Sequence[Tokens | None]) -> Tokens:
    """Return the tokens up to the first unknown segment, and stand-ins for the rest."""
    tokens: list[int] = []
    for place, found in enumerate(known):
        if found is None:
            rest = "".join(text for text, _ in segments[place:])
            return (*tokens, *stand_ins(rest.encode("utf-8", "surrogatepass")))
        tokens += found
    return tuple(tokens)


def _be_nice() -> None:
    """Lower the thread's priority: requests that wait go first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
