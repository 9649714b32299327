"""What is known about one request once it is over. No I/O: a simulator fills the same records.

Every time is in seconds since the run's origin, the moment at which its schedule starts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Failure = Literal["http", "refused", "disconnected", "timeout", "protocol", "server", "empty", "unsent", "interrupted"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request, from the moment it should have been sent to its last token.

    - ``scheduled``: when it should have been sent. A later turn of a session is due when its predecessor has ended and
      the think time is over; in a closed loop a request is due when a slot is free.
    - ``sent``: when the client began to send it.
    - ``end``: its last token, or the moment at which it was known to have failed.
    - ``token_times``: arrival of each event of the stream that carried tokens; ``token_counts``: how many tokens each
      of them carried, where the server said so; empty means one each, or not known.
    - ``first_token``: the first of ``token_times``; a simulator may give it and keep no others.
    - ``input_tokens`` and ``output_tokens`` as the server counted them, where it did; ``planned_input`` and
      ``planned_output``: as the workload asked for.
    - ``failure``: the kind of failure, with ``error`` as one line of explanation; None for success. ``unsent`` is a
      turn whose session broke before it.
    - ``warmup``: sent to warm the target up, left out of every summary.
    - ``group``: the session or the shared prefix that it belongs to; ``phase``: index of the workload's phase.
    """

    index: int
    scheduled: float
    sent: float
    end: float
    first_token: float | None = None
    token_times: tuple[float, ...] = ()
    token_counts: tuple[int, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    planned_input: int = 0
    planned_output: int = 0
    failure: Failure | None = None
    error: str | None = None
    status: int | None = None
    finish_reason: str | None = None
    warmup: bool = False
    phase: int = 0
    group: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended well, with at least one token."""
        return self.failure is None and self.first_token is not None

    @property
    def ttft(self) -> float | None:
        """Time to first token, from the send (seconds)."""
        return None if self.first_token is None else self.first_token - self.sent

    @property
    def e2el(self) -> float:
        """End-to-end latency, the job completion time, from the send (seconds)."""
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (end-to-end - TTFT) / (output tokens - 1), in seconds.

        None for answers of fewer than two tokens, which ``vllm bench serve`` leaves out as well.
        """
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.output_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive events that carried tokens (seconds)."""
        return tuple(later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False))
