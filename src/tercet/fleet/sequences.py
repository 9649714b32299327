"""The sequences that this process runs for its clients, and what is done next for one whose engine or program fails.

Pure: a :class:`RunningSequence` records and decides, whoever runs it acts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from tercet.protocol import Output, Request
from tercet.settings import RetryBudget

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0


class Retry(msgspec.Struct, frozen=True):
    """Try again after ``pause`` seconds, with ``request``, after the tokens in ``output``."""

    pause: float
    request: Request
    output: tuple[int, ...]


class RunningSequence:
    """One sequence from its request to its end. Times are seconds of one clock.

    ``tokens`` are those that its client has, ``attempt`` is 0 until it is tried again, ``engine`` is the name of the
    one that generates, or generated last; empty while none has. ``program`` serves it. ``wait_s`` is for how long it
    is tried again while no engine takes it.
    """

    __slots__ = (
        "_budget", "_first_at", "_in_vain", "_last_at", "_not_taken_since", "_tries", "_wait_s", "attempt", "began",
        "ended", "engine", "program", "request", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, program: str, budget: RetryBudget, now: float, wait_s: float = 0.0) -> None:
        self.request = request
        self.program = program
        self.engine = ""
        self.attempt = self._tries = self._in_vain = 0
        self.tokens: list[int] = []
        self.ended = False
        self.began = self._first_at = self._last_at = now
        self._budget = budget
        self._wait_s = wait_s
        self._not_taken_since: float | None = None

    @property
    def state(self) -> Literal["waiting", "running", "ended"]:
        """It waits until its client has a token."""
        if self.ended:
            return "ended"
        return "running" if self.tokens else "waiting"

    @property
    def answered(self) -> bool:
        """Whether the client has a token."""
        return bool(self.tokens)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None without any."""
        return self._first_at - self.began if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds between two tokens, on average; None if there are not two."""
        between = len(self.tokens) - 1
        return (self._last_at - self._first_at) / between if between > 0 else None

    def runs_on(self, engine: str) -> None:
        """This engine begins to generate for it."""
        self.engine = engine

    def record(self, output: Output, now: float) -> None:
        """The client gets this output."""
        if output.token_ids:
            if not self.tokens:
                self._first_at = now
            self.tokens.extend(output.token_ids)
            self._last_at = now
            self._tries = self._in_vain = 0
            self._not_taken_since = None
        if output.finish_reason is not None:
            self.ended = True

    def next_attempt(self, now: float, taken: bool = True) -> Retry | None:
        """The attempt that runs has failed: the next one, or None if the budget is spent.

        The budget counts attempts without a new token: each token refills it. It is there for the engines' sake, which
        a request may kill one after the other; an attempt that none had ``taken`` is not counted, for as long as a
        sequence waits for an engine. The first of these retries begins at once, since it goes to another engine;
        later ones wait twice as long each time. Each has an id of its own, so that nothing late of an earlier one is
        taken for it, and asks for no log probabilities of the prompt that came with the first token.
        """
        pause = min(FIRST_PAUSE * 2 ** (self._tries - 1), LONGEST_PAUSE) if self._tries else 0.0
        over = self.ended or not self._budget.retries or now + pause - self._last_at > self._budget.within_s
        if over or not self._may_go_on(now, taken):
            return None
        self.attempt += 1
        self._tries += 1
        params = self.request.sampling_params
        if self.answered:
            params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
        seq_id = f"{self.request.seq_id}.{self.attempt}"
        request = msgspec.structs.replace(self.request, seq_id=seq_id, sampling_params=params)
        return Retry(pause, request, tuple(self.tokens))

    def _may_go_on(self, now: float, taken: bool) -> bool:
        if taken or not self._wait_s:
            self._not_taken_since = None
            self._in_vain += 1
            return self._in_vain <= self._budget.retries
        if self._not_taken_since is None:
            self._not_taken_since = now
        return now - self._not_taken_since < self._wait_s


class RunningSequences:
    """Every sequence that runs in this process, for whoever wants to show them, drain an engine or move them."""

    def __init__(self) -> None:
        self._running: dict[RunningSequence, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(tuple(self._running))

    def on(self, engine: str) -> list[RunningSequence]:
        """Those that this engine generates."""
        return [sequence for sequence in self._running if sequence.engine == engine]

    @contextmanager
    def running(self, sequence: RunningSequence) -> Generator[None]:
        """While entered, the sequence is one of them."""
        self._running[sequence] = None
        try:
            yield
        finally:
            del self._running[sequence]
