"""The sequences that this process runs for its clients, and the retry after a failure of an engine or program.

No I/O: a :class:`RunningSequence` records and decides, and its caller acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import msgspec

from tercet.fleet.fleet_view import Generation, TracedEngine
from tercet.fleet.members import CallsInFlight
from tercet.logs import request_id
from tercet.protocol import Conflict, Engine, EngineUnreachable, Output, OutputStream, Request, UnknownSequence
from tercet.protocol.names import further_id
from tercet.settings import RetryBudget

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0


class Retry(msgspec.Struct, frozen=True):
    """A retry after ``pause`` seconds with ``request``, which continues after the tokens in ``output``."""

    pause: float
    request: Request
    output: tuple[int, ...]


def going_on(request: Request, seq_id: str, output: Sequence[int]) -> Request:
    """Return the request under another id, for an engine that continues after ``output``.

    Log probabilities of the prompt were sent with the first token, so they are not requested again.
    """
    params = request.sampling_params
    if output:
        params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
    return msgspec.structs.replace(request, seq_id=seq_id, sampling_params=params)


class RunningSequence:
    """One sequence from its request to its end. Times are seconds of one clock."""

    __slots__ = (
        "_budget", "_first_at", "_further_ids", "_in_vain", "_last_at", "_not_taken_since", "_tries", "_wait_s",
        "attempt", "began", "ended", "generation", "moves", "program", "request", "request_id", "tokens", "waiting",
    )  # fmt: skip

    def __init__(self, request: Request, program: str, budget: RetryBudget, now: float, wait_s: float = 0.0) -> None:
        self.request = request
        self.request_id = request_id()  # the client's id of the request, for the log
        self.program = program  # the name of the program that serves it
        self.generation: Generation | None = None  # the present or last one on an engine
        # ``attempt`` is 0 until the first retry; ``moves`` counts moves to another engine.
        self.attempt = self.moves = self._tries = self._in_vain = self._further_ids = 0
        self.tokens: list[int] = []  # output tokens that its client has
        self.ended = False
        self.waiting = CallsInFlight()  # calls that end with the sequence
        self.began = self._first_at = self._last_at = now
        self._budget = budget
        self._wait_s = wait_s  # for how long it is retried while no engine accepts it
        self._not_taken_since: float | None = None

    @property
    def state(self) -> Literal["waiting", "running", "ended"]:
        if self.ended:
            return "ended"
        return "running" if self.tokens else "waiting"

    @property
    def answered(self) -> bool:
        return bool(self.tokens)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None before it."""
        return self._first_at - self.began if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Mean of the seconds between two tokens; None before the second token."""
        between = len(self.tokens) - 1
        return (self._last_at - self._first_at) / between if between > 0 else None

    @property
    def engine(self) -> str:
        """Name of the engine that generates the sequence or generated it last; empty before the first."""
        return self.generation.engine.name if self.generation is not None else ""

    @property
    def is_generated(self) -> bool:
        """True if an engine generates the sequence now; False while its program prepares that or changes engines."""
        return self.generation is not None and self.generation.stream is not None

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        if self.generation is not None and self.generation.stream is not None:
            self.generation.stream.catch_up()
        return self.request.num_tokens + len(self.tokens)

    @property
    def last_at(self) -> float:
        """Time at which the client got its last token; before the first token, the time at which the sequence began."""
        return self._last_at

    def generates(self, generation: Generation) -> None:
        self.generation = generation

    def further_id(self) -> str:
        """Return an unused id for the next attempt, so that late messages of an earlier attempt do not match it."""
        self._further_ids += 1
        return further_id(self.request.seq_id, self._further_ids)

    def record(self, output: Output, now: float) -> None:
        if output.token_ids:
            if not self.tokens:
                self._first_at = now
            self.tokens.extend(output.token_ids)
            self._last_at = now
            # Each token shows that engines serve this request: a later failure has another cause.
            self._tries = self._in_vain = 0
            self._not_taken_since = None
        if output.finish_reason is not None:
            self.ended = True

    def next_attempt(self, now: float, taken: bool = True) -> Retry | None:
        """Return the next attempt after a failure; None if the sequence has ended or the budget is spent.

        The budget counts attempts without a new token: each token refills it. It protects engines, since one request
        may kill one engine after the other. An attempt that no engine had ``taken`` does not count as long as the
        sequence may wait for an engine. The first retry starts at once, since it goes to another engine; the pause
        doubles with each later one. Each retry has its own id (:func:`going_on`).
        """
        pause = min(FIRST_PAUSE * 2 ** (self._tries - 1), LONGEST_PAUSE) if self._tries else 0.0
        # Counted from the last token, with the pause: a retry that would begin too late is not made.
        if self.ended or not self._budget.retries or now + pause - self._last_at > self._budget.within_s:
            return None
        # 1. An engine had it, and may have failed because of it: the budget pays.
        # 2. No engine had it: only the time for which a sequence may wait for one ends that.
        if taken or not self._wait_s:
            self._not_taken_since = None
            self._in_vain += 1
            if self._in_vain > self._budget.retries:
                return None
        else:
            if self._not_taken_since is None:
                self._not_taken_since = now
            if now - self._not_taken_since >= self._wait_s:
                return None
        self.attempt += 1
        self._tries += 1
        output = tuple(self.tokens)
        return Retry(pause, going_on(self.request, self.further_id(), output), output)


class RunningSequences:
    """Every sequence that runs in this process, for code that lists them, drains an engine or moves them."""

    def __init__(self) -> None:
        self._running: dict[RunningSequence, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningSequence]:
        return iter(tuple(self._running))

    def named(self, seq_id: str) -> RunningSequence:
        """Return the sequence whose request has this id; raise :class:`~tercet.protocol.UnknownSequence` if none."""
        found = next((sequence for sequence in self._running if sequence.request.seq_id == seq_id), None)
        if found is None:
            raise UnknownSequence(f"seq_id: no sequence {seq_id!r} runs in this process", "seq_id")
        return found

    def generated(self, engine: str, seq_id: str) -> RunningSequence | None:
        """Return the sequence that this engine generates, or generated last, under ``seq_id``; None without one.

        After a retry or a move this is not the id of the client's request.
        """
        for sequence in self.on(engine):
            if sequence.generation is not None and sequence.generation.request.seq_id == seq_id:
                return sequence
        return None

    def on(self, engine: str) -> list[RunningSequence]:
        return [sequence for sequence in self._running if sequence.engine == engine]

    def running(self, sequence: RunningSequence) -> AbstractContextManager[None]:
        return _Running(self._running, sequence)


class _Running:
    """Context in which a sequence runs. It is a class, since a generator would cost every request more time."""

    __slots__ = ("_all", "_sequence")

    def __init__(self, everyone: dict[RunningSequence, None], sequence: RunningSequence) -> None:
        self._all = everyone
        self._sequence = sequence

    def __enter__(self) -> None:
        self._all[self._sequence] = None

    def __exit__(self, *error: object) -> None:
        sequence = self._sequence
        del self._all[sequence]
        # A move that waits for this sequence would wait forever.
        if len(sequence.waiting):
            sequence.waiting.lose(Conflict(f"seq_id: {sequence.request.seq_id} has ended", "seq_id"))


class MovingSequence:
    """A :class:`tercet.decisions.migration.Movable`: the present generation of ``sequence``.

    The constructor raises :class:`~tercet.protocol.Conflict` if no engine generates the sequence.
    """

    def __init__(self, sequence: RunningSequence) -> None:
        generation = sequence.generation
        if generation is None or generation.stream is None:
            raise Conflict(f"seq_id: no engine generates {sequence.request.seq_id} now", "seq_id")
        generation.stream.catch_up()
        self._sequence = sequence
        self.generation: Generation = generation
        self._id = sequence.further_id()
        # Set by the cut-over: the positions that the destination computes besides that of the next token, and the
        # seconds between the source's last token and the destination's first (None if the client had none before).
        self.recomputed = 0
        self.pause: float | None = None

    @property
    def engine(self) -> TracedEngine:
        return self.generation.engine

    @property
    def computed(self) -> int:
        return self.generation.computed

    def context(self) -> Request:
        request = self.generation.request
        tokens = (*request.prompt, *self.generation.tokens)[: self.computed]
        return msgspec.structs.replace(request, seq_id=self._id, prompt=tokens, sampling_params={})

    async def cut_over(self, to: Engine, begin: int) -> None:
        """Continue on ``to``, which has the KV up to ``begin``."""
        arrival = _FirstOutput(self.engine.costs.clock)
        left_at = None

        def following() -> OutputStream:
            nonlocal left_at
            # The source sends no more tokens from here on, so the client has exactly the tokens of this generation.
            output = tuple(self.generation.tokens)
            left_at = self._sequence.last_at if self._sequence.answered else None
            self.recomputed = max(0, self.computed - begin)
            request = going_on(self.generation.request, self._id, output)
            stream = to.start_generate(request, min(begin, request.num_tokens), output)
            stream.subscribe(arrival)
            return stream

        stream = self.generation.stream
        if stream is not None:
            stream.catch_up()
        # The source may have sent its last token while the KV was moving.
        if stream is None or not stream.hand_over(following):
            raise Conflict(
                f"seq_id: {self._sequence.request.seq_id} ended on {self.engine.name} before the cut-over", "seq_id"
            )
        arrived_at = await arrival.begun
        if arrived_at is None:
            raise EngineUnreachable(f"{to.name} did not start to generate")
        self.pause = arrived_at - left_at if left_at is not None else None


class _FirstOutput:
    """Observer of the destination's stream; ``begun`` becomes the time of its first output, or None without output."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.begun: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._clock = clock

    def on_start(self, stream: OutputStream) -> None: ...

    def on_output(self, output: Output) -> None:
        if not self.begun.done():
            self.begun.set_result(None if output.broken_off else self._clock())

    def on_end(self, error: BaseException | None) -> None:
        if not self.begun.done():
            self.begun.set_result(None)
