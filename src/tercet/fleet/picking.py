"""Picks of engines: by turns or load, by profiles of a scheduling file, by session, and for routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar, cast

import numpy as np

from tercet import logs
from tercet.decisions.scheduling import PICKERS, Decision, Engines, Scheduling, SchedulingProfile
from tercet.decisions.scheduling.plugin import Integers, block_hashes
from tercet.decisions.scheduling.profiles import LEAST_WORK, PICKER_NAMES, SCHEDULED, least_work
from tercet.decisions.scheduling.scorers import home_of
from tercet.decisions.sessions import SessionTable, session_named
from tercet.fleet.adapters import has, wanted_by
from tercet.fleet.knowledge import FleetKnowledge
from tercet.fleet.prefix_index import Holders
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    EngineUnreachable,
    EngineView,
    PrefillRule,
    Request,
    Revision,
    Role,
    RoleUnavailable,
    UnknownAdapter,
    WithoutRole,
    may_exchange_kv,
)
from tercet.protocol.names import STORE

ROUTED_BLOCK, ROUTED_CAPACITY = 64, 31_250
"""Tokens of a block and blocks of an engine in the history for routes; the prefix-cache scorer's defaults."""

# Engines whose work is compared in one pick, at random: each costs a microsecond, and more find hardly a better one.
MOST_COMPARED = 64

ViewT = TypeVar("ViewT", bound=EngineView)
AnyView = TypeVar("AnyView", bound=EngineView)


@dataclass
class Picking(Generic[ViewT]):
    """State that all views of a fleet use for picks."""

    knowledge: FleetKnowledge
    random: Random
    scheduling: Scheduling = field(default_factory=Scheduling)
    views: Sequence[ViewT] = ()  # engines that may be picked
    rows: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of the views
    # Estimated numbers of cached tokens at the time of a pick, by sequence and engine, for picks that have not ended:
    # after a pick the history contains the whole prompt.
    believed: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    without_role: WithoutRole = "serve"  # while no engine of a role answers: serve by another role, or refuse
    # The fleet's LoRA adapters by name. A request is never sent to an engine without its adapter.
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict[str, AdapterReport])
    leaving: Sequence[ViewT] = ()  # engines that may not be picked: drained, stopping, paused or warming
    explanation: tuple[SchedulingProfile, Decision, int] | None = None  # of the last pick; None if it was by turns
    sessions: SessionTable | None = None  # sessions that each stay on one engine; None if they are not used
    # The predicted seconds of prefill in line on an engine, by its name.
    waiting_on: Callable[[str], float] = lambda _: 0.0
    is_by_session: bool = False  # whether the last pick followed a session
    _alike: bool = False  # whether all engines are known to have one revision
    _turns: Counter[tuple[str, str, bool]] = field(default_factory=Counter[tuple[str, str, bool]])
    _places: Mapping[int, int] = field(default_factory=dict[int, int])
    _unfilled: set[Role] = field(default_factory=set[Role])
    _answering: dict[Role, Engines] = field(default_factory=dict[Role, Engines])

    def reopen(self, views: Sequence[ViewT], leaving: Sequence[ViewT] = ()) -> None:
        self.views, self.leaving = views, leaving
        self.rows = self.knowledge.rows([view.name for view in views])
        # Decisions name rows, which stay while engines come and go; the views are in the order of members.
        self._places = {row: place for place, row in enumerate(self.rows.tolist())}
        self.forget_candidates()

    def forget_candidates(self) -> None:
        """Drop cached candidates: roles, labels, reachability, revisions, membership or filters have changed."""
        self._answering.clear()
        self._alike = False

    def pick(
        self, role: Role, by: str, without: Sequence[str], request: Request | None, partner: str | None = None
    ) -> ViewT:
        """Pick an engine by the picker or profile called ``by``.

        ``without`` are names to avoid while there are other engines; the last one matters least. ``partner`` is the
        engine with which the picked one exchanges KV.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no engine may be picked or a strict filter leaves none,
        :class:`~tercet.protocol.RoleUnavailable`, and :class:`~tercet.protocol.BadRequest` for an unknown ``by``.
        """
        self.explanation = None
        session = None if self.sessions is None else session_named(request)
        self.is_by_session = session is not None
        profile = None
        if session is None and by not in PICKER_NAMES:
            profile = self.scheduling.profile(by, role)
            if profile is None:
                known = ", ".join([*sorted(PICKER_NAMES), *self.scheduling.profiles])
                raise BadRequest(f"pick: there is no picker or profile {by!r}; choose one of {known}", "pick")
            # Reports start with the first profile: fleets that pick by turns get none.
            self.knowledge.start_reports()
        # In this order: what can serve, what was asked to be avoided, and only then who is best among them. Avoiding is
        # a wish: if nothing else is left, an engine that failed before is better than none.
        candidates = self._preferring(self.candidates(role, request=request, partner=partner), without)
        if not len(candidates):
            raise self.no_engine_error()
        if self.sessions is not None and session is not None and request is not None:
            # A session stays on its engine while that may be picked; otherwise it is bound to another one.
            belongs = self.sessions.engine_of(session, role)
            picked = next((view for view in candidates if view.name == belongs), None)
            if picked is None:
                picked = candidates[home_of(session, candidates)]
                self.sessions.bind(session, role, picked.name)
            # The prompt so far was on that engine, so it needs no lookup of blocks.
            if cached := self.sessions.cached(session, picked.name, request):
                self.believed[request.seq_id, picked.name] = cached
            return cast("ViewT", picked)
        if profile is None:
            # Each role has its own turns: two picks of one request would otherwise always find the same pairs. The
            # background has its own, too: between them, several clients in a row would find the same engine.
            whose = role, by, candidates.background
            turn = self._turns[whose]
            self._turns[whose] += 1
            if by != LEAST_WORK:
                return cast("ViewT", candidates[PICKERS[by](candidates, turn)])
            if len(candidates) > MOST_COMPARED:
                kept = np.zeros(len(candidates), dtype=np.bool_)
                kept[self.random.sample(range(len(candidates)), MOST_COMPARED)] = True
                candidates = candidates.where(kept)
            waiting = [self.waiting_on(view.name) for view in candidates]
            return cast("ViewT", candidates[least_work(candidates, waiting, turn)])
        decision = Decision(request, role, self.knowledge, self.random, partner=self._view(partner))
        row = profile.pick(decision, candidates)
        self.explanation = profile, decision, row
        view = self.views[self._places[row]]
        if request is not None and decision.matched is not None:
            self.believed[request.seq_id, view.name] = int(decision.matched[row])
        return view

    def ranked(
        self, role: Role, request: Request, most: int, among: Collection[str] | None, partner: str | None = None,
    ) -> tuple[list[ViewT], int]:  # fmt: skip
        """Return at most ``most`` engines in the order to try them, by the profile of the role.

        No sequence is counted on them, and these picks do not enter ``believed``. The second value is the estimated
        number of the prompt's tokens in the cache of the first engine. Plugins count the first engine as picked; the
        others are alternatives if it fails. ``among`` are the names that may be picked, None for all; ``partner`` is
        avoided while there are others.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no engine that answers may be picked,
        :class:`~tercet.protocol.RoleUnavailable`, and :class:`~tercet.protocol.BadRequest` without a profile.
        """
        profile = self.scheduling.profile(SCHEDULED, role)
        if profile is None:
            raise BadRequest(f"scheduling: no profile serves the role {role}", "scheduling")
        self.knowledge.start_reports()
        without = () if partner is None else (partner,)
        candidates = self._preferring(self.candidates(role, among, request, partner), without)
        if not len(candidates):
            raise self.no_engine_error()
        if not candidates[0].reachable:  # then none of them is reachable
            raise EngineUnreachable("no engine that may be picked answers")
        decision = Decision(request, role, self.knowledge, self.random, partner=self._view(partner))
        rows = profile.ranked(decision, candidates, most)
        cached = 0 if decision.matched is None else int(decision.matched[rows[0]])
        return [self.views[self._places[row]] for row in rows], cached

    def serving(self, request: Request | None, views: Sequence[AnyView]) -> Sequence[AnyView]:
        """Return the engines that can serve the request: all for a request without an adapter.

        Raises :class:`~tercet.protocol.UnknownAdapter` if there are engines and none has the adapter.
        """
        if request is None or request.adapter is None:
            return views
        wanted = wanted_by(request, self.adapters)
        found = [view for view in views if has(view.adapters, wanted)]
        if views and not found:
            began = f", with the contents that it had when the request came ({request.adapter_digest})"
            raise UnknownAdapter(
                f"model: no engine that may be picked has the adapter {request.adapter!r}"
                f"{began if request.adapter_digest else ''}; tercet engines adapters shows the adapters of each engine",
                "model",
            )
        return found

    def candidates(
        self, role: Role, among: Collection[str] | None = None, request: Request | None = None,
        partner: str | None = None,
    ) -> Engines:  # fmt: skip
        """Return engines of the role; engines that do not answer are left out while others answer.

        If no engine of the role answers, engines of other roles are returned: every engine can do both. If the fleet is
        configured to refuse that, raises :class:`~tercet.protocol.RoleUnavailable`. ``among`` are the names that count,
        None for all. Only engines that can serve the ``request`` and may exchange KV with the ``partner`` are returned.
        Raises :class:`~tercet.protocol.UnknownAdapter` as :meth:`serving` does.
        """
        pairs_with = self._pairs_with(partner)
        background = request is not None and request.background
        for_all = pairs_with is None and among is None and (request is None or request.adapter is None)
        if for_all and role in self._answering:
            # Most picks: the candidates were computed for an earlier request, and nothing has changed since.
            return self._answering[role].for_another_decision(background)
        everyone = Engines(self.views, self.rows, self.knowledge.loads, background=background)
        if among is not None:
            everyone = everyone.where([engine.name in among for engine in everyone])
        if request is not None and request.adapter is not None:
            serving = {view.name for view in self.serving(request, everyone.views)}
            everyone = everyone.where([engine.name in serving for engine in everyone])
        if pairs_with is not None:
            everyone = everyone.where([may_exchange_kv(engine.revision, pairs_with) for engine in everyone])
        roles = ("prefill", "decode", "both") if role == "both" else (role, "both")
        answering = everyone.where([engine.reachable and engine.role in roles for engine in everyone])
        if len(answering):
            if pairs_with is None and role in self._unfilled:  # others served in its place until now
                self._unfilled.discard(role)
                logs.ROLE_BACK.tell(role=role, reason="an engine of the role answers")
            if for_all:
                self._answering[role] = answering
                return answering.for_another_decision(background)
            return answering
        if role != "both" and self.without_role == "refuse":
            raise RoleUnavailable(
                f"{self.why_without(role, partner)}, and engines of other roles may not serve in its place"
            )
        able = everyone.where([engine.role in roles for engine in everyone])
        others = everyone.where([engine.reachable for engine in everyone])
        # With a partner, the role may still be served for other partners.
        if pairs_with is None and len(others) and role != "both" and role not in self._unfilled:
            self._unfilled.add(role)
            logs.ROLE_FALLBACK.tell(role=role, reason=self.why_without(role))
        return others if len(others) else able if len(able) else everyone

    def _pairs_with(self, partner: str | None) -> Revision | None:
        """Return the partner's revision, which candidates must fit; None without a partner or if all are alike."""
        if partner is None or self._alike:
            return None
        everyone = [*self.views, *self.leaving]
        # Cached, since nearly every fleet has one revision: comparing each pair costs more than the pick.
        self._alike = len({view.revision for view in everyone}) < 2
        return None if self._alike else next((view.revision for view in everyone if view.name == partner), None)

    def _view(self, name: str | None) -> ViewT | None:
        row = None if name is None else self.knowledge.loads.row(name)
        place = None if row is None else self._places.get(row)
        return None if place is None else self.views[place]

    def _preferring(self, engines: Engines, without: Sequence[str]) -> Engines:
        """Return the engines without the names to avoid, while others remain; the last name matters least."""
        # The names that matter least come last, so they are dropped first if none would remain.
        for name in without:
            row = self.knowledge.loads.row(name)
            if row is not None:
                left = engines.where(engines.rows != row)
                engines = left if len(left) else engines
        return engines

    def why_without(self, role: Role, partner: str | None = None) -> str:
        """Return the reason why no engine of the role can be picked, with regard to the ``partner`` if given."""
        if self._pairs_with(partner) is not None and any(view.reachable for view in _of_role(role, self.views)):
            return f"no engine of the role {role} may exchange KV with {partner}"
        if any(_of_role(role, self.views)):
            return f"no engine of the role {role} answers"
        if any(_of_role(role, self.leaving)):
            return f"every engine of the role {role} is drained or stops"
        return f"this fleet has no engine of the role {role}"

    def no_engine_error(self) -> EngineUnreachable:
        if self.leaving:
            return EngineUnreachable("every engine of this fleet is drained or stops, so none may be picked")
        return EngineUnreachable("this fleet has no engines")

    def matched(
        self, request: Request, views: Sequence[EngineView], by_reports: bool = False
    ) -> dict[str, int]:  # fmt: skip
        """Return the estimated number of the prompt's tokens in each engine's cache; engines without any are left out.

        The estimate uses the engines' reports; without any, the prompts that were routed to each engine. ``by_reports``
        starts the reports. Of an engine only its device counts, of a store all tiers.
        """
        stored = self.knowledge.start_kv_events() if by_reports else self.knowledge.indexes
        on_device = self._longest(request, stored)
        if not stored:
            history = self.knowledge.routed(ROUTED_BLOCK, ROUTED_CAPACITY)
            on_device = self._longest(request, {ROUTED_BLOCK: history})
        anywhere = on_device
        if any(view.role == STORE for view in views):
            anywhere = np.maximum(on_device, self._longest(request, self.knowledge.on_any_tier))
        rows = self.knowledge.rows([view.name for view in views])
        counts = zip(views, on_device[rows].tolist(), anywhere[rows].tolist(), strict=True)
        found = ((view.name, in_all if view.role == STORE else own) for view, own, in_all in counts)
        return {name: tokens for name, tokens in found if tokens}

    def _longest(self, request: Request, indexes: Mapping[int, Holders]) -> Integers:
        found = np.zeros(self.knowledge.loads.size, dtype=np.int64)
        for size, index in indexes.items():
            found = np.maximum(found, size * index.matched(block_hashes(request, size)))
        return found

    def note_routed(self, request: Request, names: Sequence[str]) -> None:
        """Record that these engines will have the prompt in their cache; names without a row are ignored."""
        hashes = block_hashes(request, ROUTED_BLOCK)
        for name in names:
            row = self.knowledge.loads.row(name)
            # With engines' own reports, the history would only repeat what they know better.
            if row is not None and hashes and not self.knowledge.indexes:
                self.knowledge.routed(ROUTED_BLOCK, ROUTED_CAPACITY).note(row, hashes)

    def disaggregates(
        self, request: Request, decode: str, by: str | PrefillRule | None, cached: int | None = None,
        among: Collection[str] | None = None,
    ) -> bool:  # fmt: skip
        """True if another engine ``among`` these should prefill, by the scheduling's decider or the rule ``by``.

        ``cached`` is the estimated number of the prompt's tokens in the cache of ``decode``, None to estimate it here.
        """
        rule = self.scheduling.decider_called(by) if by is None or isinstance(by, str) else by
        prefill = self.candidates("prefill", among, request, decode)
        row = self.knowledge.loads.row(decode)
        prefill = prefill if row is None else prefill.where(prefill.rows != row)
        if not len(prefill):
            return False
        # What the decode engine has already need not be prefilled elsewhere; the pick of that engine has looked it up.
        if cached is None:
            cached = self.believed.get((request.seq_id, decode))
        if cached is None:
            cached = self.knowledge.cached_tokens(decode, request)
        return rule.disaggregates(request, cached, prefill)


def _of_role(role: Role, views: Sequence[EngineView]) -> Iterator[EngineView]:
    return (view for view in views if view.role in (role, "both"))
