"""The vocabulary of all other packages: request and output types, the :class:`Engine` protocol and the error tree.

Positions are token positions in ``prompt + output``; every range is half-open, ``[begin, end)``.
"""

from typing import TYPE_CHECKING, Any

from tercet.protocol.addresses import (
    CacheGroup,
    KVAddrInfo,
    KVLayout,
    RankAddress,
    Reservation,
    Revision,
    TextFingerprint,
    kv_obstacle,
    may_exchange_kv,
)
from tercet.protocol.content import (
    Content,
    MultiModalFeature,
    cache_key,
    content_of,
    digest_of_feature,
    digest_of_features,
    packed,
)
from tercet.protocol.engine import (
    Engine,
    EngineView,
    Fleet,
    PrefillRule,
    Role,
    Route,
    Source,
    TakesAdapters,
    WithoutRole,
)
from tercet.protocol.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EngineError,
    EngineNotReached,
    EngineUnreachable,
    Forbidden,
    GrammarsBusy,
    HeadTooLarge,
    LayoutMismatch,
    LeaseEnded,
    MethodNotAllowed,
    NoSpace,
    ProgramFailed,
    RequestTimeout,
    RequestTooLarge,
    RoleUnavailable,
    RouterFailed,
    RouterUnreachable,
    Saturated,
    ShuttingDown,
    TercetError,
    TransferFailed,
    Unauthorized,
    UnknownAdapter,
    UnknownEngine,
    UnknownModel,
    UnknownPath,
    UnknownSequence,
    UnsupportedMediaType,
    from_wire,
)
from tercet.protocol.types import (
    AdapterLoad,
    AdapterReport,
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
    resolve_range,
)

if TYPE_CHECKING:
    from tercet.protocol.stream import OutputStream
from tercet.protocol.names import MemberRole

__all__ = [
    "AdapterLoad", "AdapterReport", "BadRequest", "CacheGroup", "Conflict", "Content", "DeadlineExceeded", "Engine",
    "EngineError", "EngineLoad", "EngineNotReached", "EngineStatus", "EngineUnreachable", "EngineView", "Fleet",
    "Forbidden", "GrammarsBusy", "HeadTooLarge", "KVAddrInfo", "KVEvents", "KVLayout", "LayoutMismatch", "LeaseEnded",
    "MemberRole", "MethodNotAllowed", "MoveProposal", "MultiModalFeature", "NoSpace", "Output", "OutputStream",
    "PrefillRule", "ProgramFailed", "RankAddress", "Request", "RequestTimeout", "RequestTooLarge", "Reservation",
    "Revision", "Role", "RoleUnavailable", "Route", "RouterFailed", "RouterUnreachable", "Saturated", "Sent",
    "SequenceReport", "ShuttingDown", "Source", "TakesAdapters", "TercetError", "TextFingerprint", "TokenLogprob",
    "TransferFailed", "Unauthorized", "UnknownAdapter", "UnknownEngine", "UnknownModel", "UnknownPath",
    "UnknownSequence", "UnsupportedMediaType", "Usage", "WithoutRole", "cache_key", "content_of", "digest_of_feature",
    "digest_of_features", "from_wire", "kv_obstacle", "may_exchange_kv", "packed", "resolve_range",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the stream of outputs at its first use: it needs asyncio, which a command's errors and help do not."""
    if name != "OutputStream":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tercet.protocol.stream import OutputStream

    return OutputStream
