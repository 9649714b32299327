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


def with_header_layers(app: Any, answer: ASGIApp) -> ASGIApp:
    """Return ``answer`` wrapped in copies of those layers of ``app`` that add headers."""
    layers: list[Any] = []
    while app is not None:
        if isinstance(app, (CORSMiddleware, XRequestIdMiddleware)):
            layers.append(app)
        app = getattr(app, "app", None)
    for layer in reversed(layers):
        outer = copy.copy(layer)
        outer.app = answer
        answer = outer
    return answer
