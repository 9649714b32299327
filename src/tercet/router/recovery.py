"""What becomes of a sequence whose engine or program fails: when it is tried again, and from which token on.

Pure: :class:`Recovery` decides, :mod:`.service` acts.
"""

from __future__ import annotations

from tercet.protocol import Output
from tercet.settings import RetryBudget

FIRST_PAUSE = 0.2


class Recovery:
    """One sequence's tokens so far and what is left of its budget; times are seconds of one clock."""

    def __init__(self, budget: RetryBudget, now: float) -> None:
        self.tokens: list[int] = []
        self.attempts = 0
        self._budget = budget
        self._began = self._first_at = self._waiting_since = now

    @property
    def answered(self) -> bool:
        """Whether the client has a token."""
        return bool(self.tokens)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without any."""
        return self._first_at - self._began if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds between two tokens, on average; None if there are not two."""
        between = len(self.tokens) - 1
        return (self._waiting_since - self._first_at) / between if between > 0 else None

    def note(self, output: Output, now: float) -> None:
        """The client gets this output."""
        if output.token_ids:
            if not self.tokens:
                self._first_at = now
            self.tokens.extend(output.token_ids)
            self._waiting_since = now

    def next_attempt(self, now: float) -> float | None:
        """The attempt that runs has failed: seconds to wait before the next one begins, None if there is none.

        The first one begins at once, since it goes to another engine; later ones wait twice as long each time.
        """
        pause = FIRST_PAUSE * 2 ** (self.attempts - 1) if self.attempts else 0.0
        if self.attempts >= self._budget.retries or now + pause - self._waiting_since > self._budget.within_s:
            return None
        self.attempts += 1
        return pause
