"""One sequence's work on one engine: a generation, or the forward pass of a send."""

from __future__ import annotations

from collections.abc import Callable

from tercet.protocol import Output, OutputStream, Usage
from tercet.protocol.types import FinishReason
from tercet.sim.block_pool import Holding
from tercet.sim.prompts import Prompt


class Work:
    """Tokens to compute and tokens to produce.

    ``length`` prompt tokens and ``given`` output tokens exist when it comes; ``goal`` more are wanted. ``known``
    tokens exist now, ``computed`` of them have KV here. While the work decodes, both lag behind the clock of
    :class:`~tercet.sim.decode_steps.DecodingBatch` until it settles them. Outputs go into ``stream``, if there is one.
    """

    __slots__ = (
        "computed", "delivered", "given", "goal", "holding", "joined", "length", "on_chunk", "on_computed", "phase",
        "produced", "prompt", "started", "state", "stream", "usage", "wake",
    )  # fmt: skip

    def __init__(
        self, prompt: Prompt, length: int, given: int, goal: int, on_computed: Callable[[], None] | None = None
    ) -> None:
        self.prompt = prompt
        self.length = length
        self.given = given
        self.goal = goal
        self.on_computed = on_computed
        self.on_chunk: Callable[[int, int, float, float], None] | None = None
        self.holding = Holding()
        self.stream: OutputStream | None = None
        self.computed = 0
        self.produced = 0
        self.delivered = 0
        self.usage: Usage | None = None
        self.started = False
        self.state = "waiting"
        self.joined = 0
        self.phase = 0
        self.wake = 0

    @property
    def known(self) -> int:
        """Tokens that exist: prompt, given output, and what was produced here."""
        return self.length + self.given + self.produced

    @property
    def todo(self) -> int:
        """Known tokens without KV."""
        return self.known - self.computed

    @property
    def matchable(self) -> int:
        """Tokens whose KV may come from the cache: one must be computed if a token is to be produced."""
        return self.known - 1 if self.goal else self.known

    def hashes(self, block_size: int) -> list[int]:
        """The hashes of the full blocks of all known tokens."""
        after = self.given + self.produced
        if after == 0:
            return self.prompt.hashes(block_size)
        return self.prompt.hashes_with(self.prompt.output(0, after), block_size)

    def deliver(self, reason: FinishReason | None = None) -> None:
        """Hand over what was produced since the last time, with a finish reason if that was all."""
        begin, end = self.given + self.delivered, self.given + self.produced
        if reason is None and self.produced >= self.goal:
            reason = "length"
        usage = self.usage if self.delivered == 0 else None
        self.delivered = self.produced
        if self.stream is not None:
            self.stream.put(Output(self.prompt.output(begin, end), reason, usage=usage))
