"""The work of one engine, by its reports alone: for processes that do not see requests begin or end there.

Reports arrive at intervals, and have the number of prompt tokens without a first token yet. So the time of a prefill is
learned only if it ran alone: from its pick to the middle of the interval in which its tokens disappeared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tercet.decisions.cost.cost_model import CostModel, EnginePace, features_of
from tercet.decisions.cost.engine_work import MOST_INTERFERENCE
from tercet.protocol import EngineLoad

LEAST_TOKENS = 256
"""Minimum tokens of a prefill to learn from: shorter ones end within a report or two, which is too short."""
LONGEST_PREFILL = 120.0
SETTLED = 8
"""Number of prefills after which the fleet's fit distinguishes the paces of engines."""
STEPS_EVERY = 2.0
"""Minimum interval, in seconds, between two learned steps of one engine: a step time is a mean, and changes slowly."""
MEMORY = 10.0
UNKNOWN_CONTEXT = 1024


class _Alone:
    """The only running prefill, as far as known: its ``features``, and the time of its pick."""

    def __init__(self, at: float, tokens: int, features: tuple[float, ...]) -> None:
        self.at = at
        self.tokens = tokens
        self.features = features
        self.seen = False


class ReportedWork:
    """The work of one engine, for :class:`~tercet.decisions.cost.routes.RouteCandidate`.

    ``kv_tokens`` returns the capacity of its cache. Times are ``clock``'s, in seconds. ``learned`` is the number of
    prefills from which ``model`` has learned.
    """

    def __init__(self, model: CostModel, clock: Callable[[], float], kv_tokens: Callable[[], int]) -> None:
        self.prefill_pace, self.decode_pace = EnginePace(), EnginePace()
        self.decoding = self.contexts = self.coming = 0
        self.learned = 0
        self._model = model
        self._clock = clock
        self._kv_tokens = kv_tokens
        self._backlog = 0
        self._interference = 0.0
        self._at = clock()
        self._stepped_at = -math.inf
        self._alone: _Alone | None = None

    # ---- events ----------------------------------------------------------------------------------------------

    def picked(self, tokens: int, cached: int) -> None:
        """Record a prompt of ``tokens`` that was routed here; ``cached`` is its estimated cached part."""
        missing = max(1, tokens - cached)
        is_first = self._backlog == 0 and self._alone is None
        features = features_of(missing, cached, self.decoding, 0)
        self._alone = _Alone(self._clock(), tokens, features) if is_first and missing >= LEAST_TOKENS else None
        self._backlog += tokens

    def reported(self, load: EngineLoad) -> None:
        """Record the engine's load report."""
        now = self._clock()
        passed, before, backlog = now - self._at, self._backlog, load.tokens or 0
        self._at = now
        faded = math.exp(-passed / MEMORY)
        self._interference = self._interference * faded + (1 - faded if backlog else 0.0)
        self.decoding = load.running
        self.contexts = int(load.kv_usage * self._kv_tokens()) or load.running * UNKNOWN_CONTEXT
        self._learn_prefill(now, passed, backlog)
        if not before and not backlog:
            self._learn_step(now, load)
        self._backlog = backlog

    def _learn_prefill(self, now: float, passed: float, backlog: int) -> None:
        alone = self._alone
        if alone is None:
            return
        if backlog > alone.tokens or now - alone.at > LONGEST_PREFILL:
            self._alone = None  # the engine has a prompt of another process, too
        elif backlog:
            alone.seen = True
        elif alone.seen:
            self._alone = None
            seconds = now - passed / 2 - alone.at
            if seconds > 0:
                if self._model.prefills_seen >= SETTLED:  # before that, the first observed engines would look slow
                    self.prefill_pace.observe(seconds, self._model.predicted(alone.features))
                self._model.prefilled(seconds, alone.features)
                self.learned += 1
        elif now - alone.at > 2 * passed:
            self._alone = None  # it ended between two reports, or another engine got it

    def _learn_step(self, now: float, load: EngineLoad) -> None:
        if load.step_time and load.running and now - self._stepped_at >= STEPS_EVERY:
            self._stepped_at = now
            self.decode_pace.observe(load.step_time, self._model.step(load.running, self.contexts))
            self._model.stepped(load.step_time, load.running, self.contexts)

    # ---- remaining work --------------------------------------------------------------------------------------

    def waiting(self, now: float) -> float:
        """Return the seconds of prefill ahead of a new arrival."""
        return self._model.prefill(self._backlog, 0, self.decoding) * self.prefill_pace.factor if self._backlog else 0.0

    def under_way(self, now: float) -> float:
        """Return the seconds until all waiting prefills end: reports do not name the running one."""
        return self.waiting(now)

    def interference(self, now: float) -> float:
        """Return the share of recent time in which prefills ran here."""
        return self._interference

    def stall(self, now: float, seconds: float) -> float:
        """Return the total delay of decodes if a prefill that arrives now occupies the engine for ``seconds``."""
        return seconds * self.decoding

    def seconds_left(self, now: float) -> float:
        """Return the average remaining time of a running decode: half of its time, in seconds."""
        if not self.decoding:
            return 0.0
        tpot = self.pace_of_tokens(self._interference, self.decoding, self.contexts)
        return self._model.output_of(None) / 2 * tpot

    def pace_of_tokens(self, interference: float, batch: float, contexts: float) -> float:
        """Return the seconds per token of a running decode; prefills take this share of the time between steps."""
        step = self._model.step(batch, contexts) * self.decode_pace.factor
        return step / (1 - min(MOST_INTERFERENCE, interference))
