"""One running sequence during a move to another engine, in the form that ``decisions.migration.migrate`` uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from tercet.fleet.sequences import RunningSequence, going_on
from tercet.fleet.trace import Generation, TracedEngine
from tercet.protocol import Conflict, Engine, EngineUnreachable, Output, OutputStream, Request


class MovingSequence:
    """A :class:`tercet.decisions.migration.Movable`: the present generation of ``sequence``.

    After the cut-over, ``recomputed`` is the number of positions that the destination computes in addition to the
    position of the next token, and ``pause`` is the time in seconds between the last token from the source and the
    first token from the destination; None if the client had no token before.

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
        self.recomputed = 0
        self.pause: float | None = None

    @property
    def engine(self) -> TracedEngine:
        """The engine that generates the sequence."""
        return self.generation.engine

    @property
    def computed(self) -> int:
        """Number of tokens whose KV is computed; see :class:`tercet.decisions.migration.Movable`.

        The step that makes the next token computes the KV of the last one.
        """
        return self.generation.computed

    def context(self) -> Request:
        """Return a request for the computed tokens; see :class:`tercet.decisions.migration.Movable`."""
        request = self.generation.request
        tokens = (*request.prompt, *self.generation.tokens)[: self.computed]
        return msgspec.structs.replace(request, seq_id=self._id, prompt=tokens, sampling_params={})

    async def cut_over(self, to: Engine, begin: int) -> None:
        """Continue on ``to``, which has the KV up to ``begin``; see :class:`tercet.decisions.migration.Movable`."""
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
