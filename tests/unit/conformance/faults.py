"""What a picker may do wrong, and which cases of the suite must fail then: those, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Fault = Literal[
    "answers a second end",
    "answers bodies plainly in full duplex",
    "answers headers before the body's end",
    "answers who only watches",
    "believes clients",
    "cuts long bodies",
    "does not say whether it is ready",
    "does not take lists apart",
    "ends a body that trailers follow",
    "joins endpoints by spaces",
    "keeps the route",
    "keeps what may be dropped",
    "leaves streamed bodies without an answer",
    "names hosts without ports",
    "passes candidates over",
    "picks for a body without headers",
    "picks the same one always",
    "reads bodies that are cut",
    "refuses in words",
    "refuses objectives that it does not know",
    "says 500 without endpoints",
    "says another thing in metadata",
    "says nothing in metadata",
    "sends large pieces",
    "sets headers as text",
    "swallows answers' ends",
    "takes bad bodies for its own fault",
    "takes candidates as text only",
    "takes no candidates for all",
    "writes buffered bodies anew",
    "writes on answers",
    "writes to namespaces of others",
]
EXPECTED: Mapping[Fault, set[str]] = {}
