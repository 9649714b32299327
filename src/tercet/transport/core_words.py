"""Words by which an engine's core guarantees blocks that are not pinned.

A stuck core cannot pin blocks. But its last report of its sequences' blocks stays true until it allocates a block
again: before it does, it changes the number of each of its words, in every rank's region. Such blocks are sent under
the number that one of these words had when the core reported them. A receiver checks it after the copy, like any
send's generation word; so it accepts the data only if no block was reallocated before.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from tercet.transport.region import CORE_WORDS, WORD_BYTES, WORDS


class CoreWords:
    """The core's words in one rank's region, mapped by the core itself."""

    def __init__(self, path: str, offset: int) -> None:
        """Map the words. Raise ``OSError``, or ``ValueError`` for an invalid place."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, CORE_WORDS * WORD_BYTES, offset=offset)
        finally:
            os.close(fd)
        self._words = np.frombuffer(self._map, dtype=np.int64)
        self._first = np.arange(CORE_WORDS, dtype=np.int64)

    def turn(self, epoch: int) -> None:
        """Set the words to those of ``epoch``: data under words of any other epoch is not accepted from now on."""
        np.add(self._first, epoch * WORDS, out=self._words)


def core_word(epoch: int, index: int) -> int:
    """Return the number of the core's word ``index`` in ``epoch``; no other epoch has it."""
    return epoch * WORDS + index


def is_core_word(number: int) -> bool:
    """True if only a core uses this number."""
    return number % WORDS < CORE_WORDS
