"""vLLM's layers that only add headers to an answer: the fast path's answers pass through copies of them.

Relies on ``CORSMiddleware`` and ``XRequestIdMiddleware`` being among the application's layers, each with the next one
as ``app``, and on both changing only the headers of an answer.
"""

from __future__ import annotations

import copy
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware


class HeaderLayers:
    """The layers of ``app`` that add headers, outermost first."""

    def __init__(self, app: Any) -> None:
        self._layers: list[Any] = []
        while app is not None:
            if isinstance(app, (CORSMiddleware, XRequestIdMiddleware)):
                self._layers.append(app)
            app = getattr(app, "app", None)

    def around(self, answer: ASGIApp) -> ASGIApp:
        """Return ``answer`` wrapped in copies of the layers, which add their headers."""
        for layer in reversed(self._layers):
            outer = copy.copy(layer)
            outer.app = answer
            answer = outer
        return answer
