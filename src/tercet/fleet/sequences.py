"""The sequences that this process runs for its clients, and what is done next for one whose engine or program fails.

Pure: a :class:`RunningSequence` records and decides, whoever runs it acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import msgspec

from tercet.fleet.calls_in_flight import CallsInFlight
from tercet.fleet.trace import Generation
from tercet.protocol import Conflict, Output, Request, UnknownSequence
from tercet.protocol.seq_ids import further_id
from tercet.settings import RetryBudget
from tercet.settings.log_lines import request_id

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0


class Retry(msgspec.Struct, frozen=True):
    """Try again after ``pause`` seconds, with ``request``, after the tokens in ``output``."""

    pause: float
    request: Request
    output: tuple[int, ...]


def going_on(request: Request, seq_id: str, output: Sequence[int]) -> Request:
    """The request under another id, for an engine that goes on after ``output``.

    Log probabilities of the prompt came with the first token, and are not asked for again.
    """
    params = request.sampling_params
    if output:
        params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
    return msgspec.structs.replace(request, seq_id=seq_id, sampling_params=params)


class RunningSequence:
    """One sequence from its request to its end. Times are seconds of one clock.

    ``tokens`` are those that its client has, ``attempt`` is 0 until it is tried again, ``moves`` counts how often it
    went to another engine while it ran. ``generation`` is what an engine does for it now, or did last; None while none
    has. ``program`` serves it. ``request_id`` is what its client calls the request, for the log. ``waiting`` is what
    ends with it. ``wait_s`` is for how long it is tried again while no engine takes it.
    """

    __slots__ = (
        "_budget", "_first_at", "_further_ids", "_in_vain", "_last_at", "_not_taken_since", "_tries", "_wait_s",
        "attempt", "began", "ended", "generation", "moves", "program", "request", "request_id", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, request: Request, program: str, budget: RetryBudget, now: float, wait_s: float = 0.0) -> None:
        self.request = request
        self.request_id = request_id()
        self.program = program
        self.generation: Generation | None = None
        self.attempt = self.moves = self._tries = self._in_vain = self._further_ids = 0
        self.tokens: list[int] = []
        self.ended = False
        self.waiting = CallsInFlight()
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

    @property
    def engine(self) -> str:
        """The name of the engine that generates it, or generated last; empty while none has."""
        return self.generation.engine.name if self.generation is not None else ""

    @property
    def is_generated(self) -> bool:
        """Whether an engine generates it now; its program may also be preparing that, or between two engines."""
        return self.generation is not None and self.generation.stream is not None

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and output, as of now."""
        if self.generation is not None and self.generation.stream is not None:
            self.generation.stream.catch_up()
        return self.request.num_tokens + len(self.tokens)

    @property
    def last_at(self) -> float:
        """When the client got its last token; while it has none, when the sequence began."""
        return self._last_at

    def generates(self, generation: Generation) -> None:
        """An engine begins to generate for it."""
        self.generation = generation

    def further_id(self) -> str:
        """An id that no engine knows, for what it does for this sequence next: nothing late is taken for that."""
        self._further_ids += 1
        return further_id(self.request.seq_id, self._further_ids)

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
        later ones wait twice as long each time. Each has an id of its own (:func:`going_on`).
        """
        pause = min(FIRST_PAUSE * 2 ** (self._tries - 1), LONGEST_PAUSE) if self._tries else 0.0
        over = self.ended or not self._budget.retries or now + pause - self._last_at > self._budget.within_s
        if over or not self._may_go_on(now, taken):
            return None
        self.attempt += 1
        self._tries += 1
        output = tuple(self.tokens)
        return Retry(pause, going_on(self.request, self.further_id(), output), output)

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

    def named(self, seq_id: str) -> RunningSequence:
        """The one whose request has this id; raises :class:`~tercet.protocol.UnknownSequence` if none that runs has."""
        found = next((sequence for sequence in self._running if sequence.request.seq_id == seq_id), None)
        if found is None:
            raise UnknownSequence(f"seq_id: no sequence {seq_id!r} runs in this process", "seq_id")
        return found

    def generated(self, engine: str, seq_id: str) -> RunningSequence | None:
        """The one that this engine generates, or generated last, under that id, which need not be its request's."""
        for sequence in self.on(engine):
            if sequence.generation is not None and sequence.generation.request.seq_id == seq_id:
                return sequence
        return None

    def on(self, engine: str) -> list[RunningSequence]:
        """Those that this engine generates."""
        return [sequence for sequence in self._running if sequence.engine == engine]

    def running(self, sequence: RunningSequence) -> AbstractContextManager[None]:
        """While entered, the sequence is one of them."""
        return _Running(self._running, sequence)


class _Running:
    """A sequence among all that run. No generator: every request has one of these."""

    __slots__ = ("_all", "_sequence")

    def __init__(self, everyone: dict[RunningSequence, None], sequence: RunningSequence) -> None:
        self._all = everyone
        self._sequence = sequence

    def __enter__(self) -> None:
        self._all[self._sequence] = None

    def __exit__(self, *error: object) -> None:
        sequence = self._sequence
        del self._all[sequence]
        if len(sequence.waiting):
            sequence.waiting.lose(Conflict(f"seq_id: {sequence.request.seq_id} has ended", "seq_id"))
