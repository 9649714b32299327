"""Sessions of agents: the engines of their turns, the contexts that a drain moves, and pinned KV. Pure decisions."""

from tercet.decisions.sessions.context import Context
from tercet.decisions.sessions.keeping import EngineSeen
from tercet.decisions.sessions.names import closes_session, session_in_body, session_named
from tercet.decisions.sessions.table import Action, Bindings, GiveUp, Keep, MoveContext, Pause, SessionTable

__all__ = [
    "Action", "Bindings", "Context", "EngineSeen", "GiveUp", "Keep", "MoveContext", "Pause", "SessionTable",
    "closes_session", "session_in_body", "session_named",
]  # fmt: skip
