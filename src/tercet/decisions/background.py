"""How many tokens of background requests an engine's next step may have: a state machine without I/O.

Requests of batches run in the background: an engine computes them with what its other requests leave. A client's first
token waits for the step in progress and then for the steps of its prompt. So no background request is in a step while
another request waits or is in its prompt, and background requests lengthen the steps in which others generate by at
most ``SLACK`` of the time of a step with a prompt: on any device, less than that share of a client's time to first
token. A client that comes to an engine without others waits for the background's step. A bound in tokens alone would
not do: 128 tokens lengthen a step of an H100 by an eighth, one of a laptop many times.

What a step costs is measured. Every ``PROBE``-th step has no background requests (or one token, if there are no other
requests): the difference to the steps between them is what these requests cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The share of the time of a step with a prompt by which background requests may lengthen other steps.
SLACK = 0.05
# The share by which a step of background requests alone may be longer than one with a single token: a client that comes
# then waits for a step in any case, and most of its time is that of reading the weights.
SLACK_ALONE = 0.125
PROBE = 32
# Weight of the latest step in the mean times, and the share by which the number of tokens changes after a step.
NEWEST, CHANGE = 0.1, 0.05
FIRST = 16
# The time of a step with a prompt, in steps without, until one has been measured.
PROMPT = 2.0
# Seconds without other requests after which the background has an engine for itself. Of clients who send a request in
# 13 s, a hundredth comes after such a pause, and waits for one whole step.
IDLE_S = 60.0


@dataclass
class Level:
    """What is known of steps without prompts of others: for those in which others generate, or for all the rest."""

    size: float = FIRST  # background tokens that a step may have
    without: float | None = None  # mean seconds of a step without these; with one, if no other request generates


@dataclass
class StepShare:
    """The share of background requests in the steps of one engine; times are in seconds, of any clock.

    ``most`` is the number of tokens of a step. ``least`` is at least one: background requests go on, however slowly, on
    an engine whose other requests only generate.
    """

    most: int
    least: int = 1
    shared: Level = field(default_factory=Level)
    alone: Level = field(default_factory=Level)
    _prompt: float | None = None  # mean time of steps with a prompt of another request
    _others_at: float | None = None
    _steps: int = 0

    def resume(self, now: float) -> None:
        """Begin again: nothing is known of the requests since the last background request ended."""
        self._others_at = now

    def tokens(self, now: float, has_prompts: bool, decodes: int) -> int:
        """Return the most tokens of background requests in the step that begins now.

        ``has_prompts`` is true if another request waits for a step or has not computed its prompt, and ``decodes`` is
        the number of other requests that generate.
        """
        if has_prompts or decodes or self._others_at is None:
            self._others_at = now
        if has_prompts:
            return 0
        if now - self._others_at >= IDLE_S:
            return self.most
        self._steps += 1
        if self._steps % PROBE == 1:
            return 0 if decodes else self.least
        return max(self.least, min(int((self.shared if decodes else self.alone).size), self.most))

    def ended(self, seconds: float, has_prompts: bool, decodes: int, tokens: int) -> None:
        """Learn from a step that has ended.

        It had prompts of other requests or not, and ``decodes`` of them and background ``tokens``.
        """
        level = self.shared if decodes else self.alone
        if has_prompts:
            if not tokens:
                self._prompt = _mean(self._prompt, seconds)
        elif tokens <= (0 if decodes else self.least):
            level.without = _mean(level.without, seconds)
        elif level.without is not None:
            room = SLACK * (self._prompt or PROMPT * level.without)
            if not decodes:
                room = max(room, SLACK_ALONE * level.without)
            # By the sign alone: what few tokens cost is less than the difference between two steps without any.
            if seconds - level.without > room:
                level.size = max(self.least, level.size * (1 - CHANGE))
            elif tokens * 2 >= level.size:  # few tokens do not show what many would cost
                level.size = min(level.size * (1 + CHANGE), self.most)


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else before + (latest - before) * NEWEST
