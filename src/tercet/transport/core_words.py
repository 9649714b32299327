"""Words by which an engine's core vouches for blocks that nobody has pinned.

A core that stands still can pin nothing. What it said before of the blocks of its sequences holds all the same, until
it hands a block out anew: before it does, it gives each of its words, in every rank's region, another number. Such
blocks are sent under the number that one of these words had when the core said where they are. A receiver looks at it
after the copy, as at any send's generation word; so it takes what it has read only if no block was handed out before.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from tercet.transport.region import CORE_WORDS, WORD_BYTES, WORDS

MAX_EPOCH = 2**63 // WORDS - 1


class CoreWords:
    """The core's words in one rank's region, mapped by the core itself."""

    def __init__(self, path: str, offset: int) -> None:
        """Raises ``OSError``, or ``ValueError`` for a place that holds no words."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, CORE_WORDS * WORD_BYTES, offset=offset)
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._map, dtype=np.int64)
        self._first = np.arange(CORE_WORDS, dtype=np.int64)

    def turn(self, epoch: int) -> None:
        """Make them those of ``epoch``: what is vouched for by those of any other one is not taken from now on."""
        np.add(self._first, epoch * WORDS, out=self._words)


def core_word(epoch: int, index: int) -> int:
    """The number that word ``index`` of the core's has in ``epoch``, and never again."""
    return epoch * WORDS + index


def is_core_word(number: int) -> bool:
    """Whether only a core gives a word this number."""
    return number % WORDS < CORE_WORDS
