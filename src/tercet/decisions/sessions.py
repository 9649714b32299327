"""Sessions of agents: the engines of their turns, the contexts that a drain moves, and pinned KV. Pure.

A request names its session in a header or its body. :class:`SessionTable` remembers the engine of each session and the
context of its last turns. Each of its methods takes an event, and returns actions on KV: to pin it, to end a pin, or to
move it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec
import numpy as np

from tercet.decisions.scheduling.plugin import key_of, preference
from tercet.decisions.scheduling.scorers import session_of
from tercet.protocol import Request, Role
from tercet.protocol.addresses import UNKNOWN_REVISION, Revision, may_exchange_kv
from tercet.protocol.content import TOKEN_BYTES, packed, unpacked
from tercet.protocol.headers import AGENT_HEADERS, OTHER_SESSION_HEADERS, SESSION_HEADER, SUBAGENT_HEADER
from tercet.protocol.names import kept_name
from tercet.settings.fleet_settings import SessionSettings

HEADERS = (SESSION_HEADER, *OTHER_SESSION_HEADERS, SUBAGENT_HEADER, *AGENT_HEADERS)
# Fields of bodies, first those of vLLM's API; the first one in a body counts. A trajectory is one chain of reasoning of
# a run, and is therefore the session; if a client of Dynamo names no trajectory, its session id is used.
FIELDS = (
    ("session_id",),
    ("vllm_xargs", "session_id"),
    ("nvext", "agent_context", "trajectory_id"),
    ("nvext", "agent_context", "session_id"),
    ("nvext", "session_control", "session_id"),
    ("program_id",),
)
Pause = Literal["tool", "client"]
"""Reason of a pause between two turns: the session waits for a tool that it called, or for its client."""
Bindings = Mapping[str, Mapping[Role, str]]
"""The engines of sessions, by session and role."""
# Maximum number of contexts per session: each of its simultaneous model calls has one.
MOST_CONTEXTS = 4
# Maximum number of contexts that leave one engine at the same time.
MOVES_AT_ONCE = 2


class Context:
    """The tokens of a turn that has ended, four bytes each."""

    __slots__ = (
        "_adapter", "_cache_salt", "_digest", "_prompt_size", "_tokens", "engine", "kept_at", "number", "session", "to",
    )  # fmt: skip

    def __init__(self, number: int, session: str, engine: str, request: Request, output: Sequence[int]) -> None:
        self.number = number
        self.session = session
        self.engine = engine  # whose cache has most of their KV
        self.kept_at: float | None = None  # the time at which that was pinned there; None if it is not
        self.to: str | None = None  # the engine to which it is being moved
        self._prompt_size = request.num_tokens * TOKEN_BYTES
        # The last token's KV was never computed.
        self._tokens = packed(request.prompt) + packed(output[:-1])
        self._cache_salt, self._adapter, self._digest = request.cache_salt, request.adapter, request.adapter_digest

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def request(self, seq_id: str) -> Request:
        """Return a request for these tokens, for verbs that identify KV by its tokens."""
        return Request(
            seq_id=seq_id, prompt=tuple(unpacked(self._tokens)), cache_salt=self._cache_salt, adapter=self._adapter,
            adapter_digest=self._digest,
        )  # fmt: skip

    def shared_with(self, request: Request, prompt: bytes) -> int:
        """Return the number of the request's first tokens that this context has; ``prompt`` is packed.

        That is all of the context, or the turn's prompt, or 0. A chat template may write an answer in another way than
        the model did; then only the prompt is repeated.
        """
        if (request.cache_salt, request.adapter) != (self._cache_salt, self._adapter):
            return 0
        if prompt.startswith(self._tokens):
            return self.num_tokens
        return self._prompt_size // TOKEN_BYTES if prompt.startswith(self._tokens[: self._prompt_size]) else 0


class EngineSeen(msgspec.Struct, frozen=True):
    """An engine as sessions see it."""

    name: str
    is_open: bool = True  # it may be picked and answers
    decodes: bool = True  # its role decodes
    leaving: bool = False  # it is to be emptied
    kv_tokens: int = 0  # capacity of its KV cache, 0 if unknown
    kv_usage: float = 0.0  # share of it in use
    waiting: int = 0  # requests in its queue
    revision: Revision = UNKNOWN_REVISION  # KV moves between engines whose revisions allow it

    def share(self, tokens: int) -> float:
        """Return the part of the KV cache that ``tokens`` need; all of it while the capacity is unknown."""
        return tokens / self.kv_tokens if self.kv_tokens else 1.0


def session_named(request: Request | None) -> str | None:
    """Return the session of a request, from its headers or its body; None without one.

    A session belongs to the client that made it (:func:`~tercet.protocol.names.owned_name`). The field ``user``
    is not used: one user has many sessions.
    """
    return session_of(request, HEADERS)


def session_in_body(body: Mapping[str, Any]) -> str | None:
    """Return the session that a body names, in the form that is kept; None unless it is a string."""
    return next((kept_name(found) for path in FIELDS if (found := _text_at(body, path))), None)


def closes_session(body: Mapping[str, Any]) -> bool:
    """Return True if a body says that its session ends with this request, as clients of Dynamo 1.1 do."""
    return _text_at(body, ("nvext", "session_control", "action")) == "close"


def _text_at(body: Any, path: tuple[str, ...]) -> str | None:
    for name in path:
        if not isinstance(body, dict):
            return None
        body = cast("dict[str, Any]", body).get(name)
    return body if isinstance(body, str) else None


@dataclass(frozen=True)
class Keep:
    """Action: pin a context's KV on its engine."""

    context: Context


@dataclass(frozen=True)
class GiveUp:
    """Action: end the pin of a context's KV on ``engine``."""

    context: Context
    engine: str


@dataclass(frozen=True)
class MoveContext:
    """Action: copy a context's KV to the engine ``to``; the session belongs to that engine from now on."""

    context: Context
    to: str


Action = Keep | GiveUp | MoveContext


@dataclass
class _Session:
    engines: dict[Role, str] = field(default_factory=dict["Role", str])
    contexts: list[Context] = field(default_factory=list[Context])
    running: int = 0
    last_at: float = 0.0
    paused_at: float | None = None
    pause: Pause = "client"


class SessionTable:
    """All sessions by name, in the order of their last turn. Times are seconds of one clock.

    A session belongs to one engine that prefills and one that decodes. It stays there until that engine fails it, is
    drained or leaves: it follows a moved sequence, and a moved context.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._sessions: dict[str, _Session] = {}
        self._numbers = itertools.count()
        self._tokens = 0
        self._kept: dict[Context, None] = {}
        self._known: set[str] = set()
        self.changes = 0
        """Number of changes of :attr:`bindings`."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def kept(self) -> int:
        return len(self._kept)

    # ---- engines of turns ----------------------------------------------------------------------------------------

    @property
    def bindings(self) -> Bindings:
        """The engines of each session by role, in the order of the last turns: what a restarted router needs."""
        return {name: dict(each.engines) for name, each in self._sessions.items() if each.engines}

    def restore(self, bindings: Bindings, now: float) -> None:
        """Remember the ``bindings`` of an earlier process, without the tokens of their contexts."""
        for name, engines in [*bindings.items()][-self._settings.most :]:
            self._sessions.setdefault(name, _Session(engines=dict(engines), last_at=now))

    def engine_of(self, session: str, role: Role) -> str | None:
        """Return the engine that the session belongs to, for picks of this role; None before its first pick."""
        found = self._sessions.get(session)
        return None if found is None else found.engines.get(_side(role))

    def bind(self, session: str, role: Role, engine: str) -> None:
        found = self._sessions.get(session)
        if found is not None:
            self._bind(found, role, engine)

    def _bind(self, found: _Session, role: Role, engine: str) -> None:
        if found.engines.get(_side(role)) != engine:
            found.engines[_side(role)] = engine
            self.changes += 1

    def cached(self, session: str, engine: str, request: Request) -> int:
        """Return the number of the request's first tokens that the engine should have, by the session's turns."""
        found = self._sessions.get(session)
        there = () if found is None else [context for context in found.contexts if context.engine == engine]
        prompt = packed(request.prompt) if there else b""
        return max((context.shared_with(request, prompt) for context in there), default=0)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def begins(self, session: str, now: float) -> tuple[list[Action], tuple[Pause, float] | None]:
        """Begin a turn; return actions, and the pause that ends with its seconds, or None without a pause."""
        found = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = found
        pause = None if found.paused_at is None else (found.pause, now - found.paused_at)
        found.paused_at, found.last_at = None, now
        found.running += 1
        # Beyond the limit the sessions go whose last turn is the longest ago; a running turn keeps its session.
        actions = list[Action]()
        while len(self._sessions) > self._settings.most:
            oldest = next((name for name, each in self._sessions.items() if not each.running), None)
            if oldest is None:
                break
            actions += self._forget(oldest)
        return actions, pause

    def arrives(self, session: str, request: Request, engines: Mapping[str, EngineSeen]) -> list[Action]:
        """Return moves of the contexts that a beginning turn needs from an engine that is leaving; they go first."""
        found, prompt = self._sessions[session], packed(request.prompt)
        gone = {name for name, engine in engines.items() if engine.leaving}
        leaving = [each for each in found.contexts if each.to is None and each.engine in gone]
        needed = [context for context in leaving if context.shared_with(request, prompt)]
        return [move for context in needed for move in self._move(context, engines)]

    def moving(self, session: str) -> list[Context]:
        found = self._sessions.get(session)
        return [] if found is None else [context for context in found.contexts if context.to is not None]

    def ends(
        self, session: str, request: Request, output: Sequence[int], engine: str, now: float
    ) -> list[Action]:  # fmt: skip
        """Record that a turn has ended on ``engine``; the name is empty if no engine generated output."""
        found = self._sessions.get(session)
        if found is None:
            return []
        found.running = max(0, found.running - 1)
        found.last_at = now
        if not engine:
            return []
        self._bind(found, "decode", engine)
        # A context can be moved or kept only by a request that has all of it, and the data of images is not remembered.
        if request.mm_features or not output:
            return []
        prompt = packed(request.prompt)
        # This turn's context has the one before it as its beginning: one is kept, and not each turn of a conversation.
        replaced = [each for each in found.contexts if each.to is None and each.shared_with(request, prompt)]
        left = [each for each in found.contexts if each not in replaced]
        replaced += left[: max(0, len(left) - MOST_CONTEXTS + 1)]
        actions = [action for context in replaced for action in self._drop(found, context)]
        context = Context(next(self._numbers), session, engine, request, output)
        found.contexts.append(context)
        self._tokens += context.num_tokens
        # Beyond the limit contexts go in the order of the sessions' last turns; one that moves stays until it has.
        for each in [*self._sessions.values()]:
            for old in [*each.contexts]:
                if self._tokens > self._settings.tokens and old.to is None:
                    actions += self._drop(each, old)
        return actions

    def pauses(self, session: str, pause: Pause, engines: Mapping[str, EngineSeen], now: float) -> list[Action]:
        """Record that the client has the whole answer of an ended turn; it returns after a tool call, or by itself."""
        found = self._sessions.get(session)
        if found is None or found.running or not found.contexts:
            return []
        found.pause, found.paused_at = pause, now
        context, keep = found.contexts[-1], self._settings.keep
        engine = engines.get(context.engine)
        wanted = keep == "all" or (keep == "tools" and pause == "tool")
        if not wanted or engine is None or engine.leaving or context.kept_at is not None:
            return []
        return self._keep(context, engine)

    def over(self, session: str) -> list[Action]:
        return list(self._forget(session))

    # ---- engines -------------------------------------------------------------------------------------------------

    def look(self, engines: Mapping[str, EngineSeen], now: float) -> list[Action]:
        """Return the actions due now: forget old sessions, empty drained engines, and end pins."""
        settings, old = self._settings, list[str]()
        for name, each in self._sessions.items():  # in the order of their last turns
            if not each.running and now - each.last_at <= settings.ttl_s:
                break
            if not each.running:
                old.append(name)
        actions = [action for name in old for action in self._forget(name)]
        if (names := set(engines)) != self._known:  # contexts on engines that are no longer members are gone
            self._known = names
            gone = [each for each in self._contexts() if each.engine not in engines and each.to is None]
            actions += [action for context in gone for action in self._drop(self._sessions[context.session], context)]
        for engine in engines.values():
            if engine.leaving:
                actions += self._emptied(engine, engines)
                continue
            kept = self._kept_on(engine.name)
            late = [each for each in kept if each.kept_at is not None and now - each.kept_at >= settings.keep_s]
            # Further pins end until usage is below the limit; while requests wait, at least one does.
            usage, is_first = engine.kv_usage, True
            for context in self._ordered([each for each in kept if each not in late]):
                if usage < settings.give_up_at and not (engine.waiting and is_first):
                    break
                usage -= engine.share(context.num_tokens)
                late.append(context)
                is_first = False
            actions += [action for context in late for action in self._give_up(context)]
        return actions

    def left_on(self, engine: str) -> int:
        return sum(1 for _ in self._resting_on(engine))

    def moved(self, context: Context, engines: Mapping[str, EngineSeen], *, done: bool) -> list[Action]:
        """Record the end of a move. After a failed one, or if the engine has left meanwhile, the context is dropped."""
        source, to = context.engine, context.to
        context.to = None
        found = self._sessions.get(context.session)
        if found is None or context not in found.contexts or to is None:
            return self._give_up(context)
        was_kept = context.kept_at is not None
        actions = self._give_up(context)
        engine = engines.get(to)
        if not done or engine is None:
            return [*actions, *self._drop(found, context)]
        context.engine = to
        # An engine that began to leave meanwhile would wait for the pin; the context is moved on from there.
        if was_kept and not engine.leaving and source != to:
            actions += self._keep(context, engine)
        return actions

    def not_kept(self, context: Context) -> None:
        context.kept_at = None
        self._kept.pop(context, None)

    def kept_since(self, context: Context, now: float) -> None:
        if context.kept_at is not None:
            context.kept_at = now

    # ---- private parts -------------------------------------------------------------------------------------------

    def _contexts(self) -> Iterator[Context]:
        for session in self._sessions.values():
            yield from session.contexts

    def _kept_on(self, engine: str) -> list[Context]:
        return [context for context in self._kept if context.engine == engine]

    def _resting_on(self, engine: str) -> Iterator[Context]:
        for session in self._sessions.values():
            if not session.running:
                yield from (context for context in session.contexts if context.engine == engine)

    def _ordered(self, contexts: Iterable[Context]) -> list[Context]:
        """Return contexts in the order in which pins end: clients' pauses before those for tools, the longest first."""
        return sorted(contexts, key=lambda each: (self._pause_of(each) == "tool", each.kept_at or 0.0))

    def _pause_of(self, context: Context) -> Pause:
        return self._sessions[context.session].pause

    def _keep(self, context: Context, engine: EngineSeen) -> list[Action]:
        """Pin a context; if there is no space, first end pins that end before it in the order."""
        kept, actions = self._kept_on(engine.name), list[Action]()
        lower = [each for each in self._ordered(kept) if self._pause_of(each) == "client"]
        lower = lower if self._pause_of(context) == "tool" else []
        while engine.share(sum(each.num_tokens for each in (context, *kept))) > self._settings.keep_share:
            if not lower:
                return actions
            kept.remove(lower[0])
            actions += self._give_up(lower.pop(0))
        context.kept_at = float("inf")  # its time begins when it is pinned
        self._kept[context] = None
        return [*actions, Keep(context)]

    def _give_up(self, context: Context) -> list[Action]:
        if context.kept_at is None:
            return []
        self.not_kept(context)
        return [GiveUp(context, context.engine)]

    def _emptied(self, engine: EngineSeen, engines: Mapping[str, EngineSeen]) -> list[Action]:
        """Move the contexts of a leaving engine, first those that return first: paused for tools, then the latest."""
        resting = list(self._resting_on(engine.name))
        under_way = sum(1 for context in self._contexts() if context.engine == engine.name and context.to is not None)
        waiting = [context for context in resting if context.to is None]
        waiting.sort(key=lambda each: (self._pause_of(each) != "tool", -self._sessions[each.session].last_at))
        begun = waiting[: max(0, MOVES_AT_ONCE - under_way)]
        actions = [action for context in begun for action in self._move(context, engines)]
        if not any(isinstance(action, MoveContext) for action in actions) and not under_way:
            # No engine can take the contexts, and the leaving engine would wait for its pins.
            actions += [action for context in self._kept_on(engine.name) for action in self._give_up(context)]
        return actions

    def _move(self, context: Context, engines: Mapping[str, EngineSeen]) -> list[Action]:
        source = engines[context.engine].revision
        able = [each for each in engines.values() if each.is_open and may_exchange_kv(each.revision, source)]
        # To the engine that the session prefers, of those that decode if there are any. The session is bound to it at
        # once: a turn that begins during the move goes there.
        able = [engine for engine in able if engine.decodes] or able
        if not able:
            return []
        weights = preference(context.session, np.array([key_of(engine.name) for engine in able], dtype=np.uint64))
        context.to = to = able[int(weights.argmax())].name
        self._bind(self._sessions[context.session], "decode", to)
        return [MoveContext(context, to)]

    def _drop(self, session: _Session, context: Context) -> list[Action]:
        session.contexts.remove(context)
        self._tokens -= context.num_tokens
        return self._give_up(context)

    def _forget(self, session: str) -> Iterator[Action]:
        found = self._sessions.pop(session, None) or _Session()
        self.changes += 1
        for context in [*found.contexts]:
            yield from self._drop(found, context)


def _side(role: Role) -> Role:
    """Return the role of the session's engine: one engine prefills for others, and one has the session's context."""
    return "prefill" if role == "prefill" else "decode"
