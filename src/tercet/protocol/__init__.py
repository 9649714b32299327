"""The words that every other room uses: types, the :class:`Engine` protocol and the error tree.

Positions are token positions in ``prompt + output``; every range is half-open, ``[begin, end)``.
"""

from tercet.protocol.addresses import KVAddrInfo, KVLayout, RankAddress
from tercet.protocol.content import Content, content_of, packed
from tercet.protocol.engine import Engine, Reservation
from tercet.protocol.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EngineError,
    EngineNotReached,
    EngineUnreachable,
    FrontDoorUnreachable,
    LayoutMismatch,
    LeaseEnded,
    NoSpace,
    RequestTooLarge,
    RoleUnavailable,
    Saturated,
    ShuttingDown,
    TercetError,
    TransferFailed,
    Unauthorized,
    UnknownEngine,
    UnknownSequence,
    from_wire,
)
from tercet.protocol.fleet import EngineView, Fleet, PrefillRule, Role, Route, WithoutRole
from tercet.protocol.ranges import resolve_range
from tercet.protocol.stream import OutputStream
from tercet.protocol.types import (
    EngineLoad,
    EngineStatus,
    KVEvents,
    MoveProposal,
    Output,
    Request,
    Sent,
    SequenceReport,
    TokenLogprob,
    Usage,
)

__all__ = [
    "BadRequest",
    "Conflict",
    "Content",
    "DeadlineExceeded",
    "Engine",
    "EngineError",
    "EngineLoad",
    "EngineNotReached",
    "EngineStatus",
    "EngineUnreachable",
    "EngineView",
    "Fleet",
    "FrontDoorUnreachable",
    "KVAddrInfo",
    "KVEvents",
    "KVLayout",
    "LayoutMismatch",
    "LeaseEnded",
    "MoveProposal",
    "NoSpace",
    "Output",
    "OutputStream",
    "PrefillRule",
    "RankAddress",
    "Request",
    "RequestTooLarge",
    "Reservation",
    "Role",
    "RoleUnavailable",
    "Route",
    "Saturated",
    "Sent",
    "SequenceReport",
    "ShuttingDown",
    "TercetError",
    "TokenLogprob",
    "TransferFailed",
    "Unauthorized",
    "UnknownEngine",
    "UnknownSequence",
    "Usage",
    "WithoutRole",
    "content_of",
    "from_wire",
    "packed",
    "resolve_range",
]
