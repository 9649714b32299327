"""One engine for one session, as long as it keeps up."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from tercet.protocol import Request
from tercet.scheduling.plugin import Decision, Engines, Floats, Scorer
from tercet.scheduling.sessions import preference


class SessionAffinityScorer(Scorer, frozen=True):
    """1 for the engine that the request's session belongs to, 0 for the others; 0 for all without a session.

    ``header`` (lower case) names the session; without it, and with ``by_user``, the OpenAI request's ``user`` does. It
    belongs to an engine by consistent hashing: no table is kept, front doors agree, and only the sessions of an engine
    that leaves move. An engine that has more than ``max_load`` times its share of this front door's sequences is passed
    over; its sessions go to the next one in their own order.
    """

    header: Annotated[str, Meta(min_length=1, pattern="^[a-z0-9-]+$")] = "x-session-token"
    by_user: bool = True
    max_load: Annotated[float, Meta(gt=1)] = 1.25

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By session."""
        scores = np.zeros(len(engines))
        session = self._session(decision.request)
        if session:
            weights = preference(session, engines.keys)
            # One more than its share is always allowed: with few sequences any of them would be above it.
            bound = np.ceil(self.max_load * (engines.in_flight.sum() + 1) / len(engines))
            weights[engines.in_flight >= bound] = 0
            scores[int(weights.argmax())] = 1.0
        return scores

    def _session(self, request: Request | None) -> str | None:
        if request is None:
            return None
        return request.headers.get(self.header) or (request.user if self.by_user else None)
