"""A clock that stands still until a test sets it."""

from __future__ import annotations


class Clock:
    """Called as a clock, or in the place of the module ``time``."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = __call__
