"""What is decided about sessions: where turns run, whose KV stays pinned, and what leaves a drained engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tercet.decisions.sessions import (
    MOST_CONTEXTS,
    Action,
    Context,
    EngineSeen,
    GiveUp,
    Keep,
    MoveContext,
    SessionTable,
    closes_session,
    session_in_body,
    session_named,
)
from tercet.protocol import Request
from tercet.protocol.addresses import Revision
from tercet.settings.fleet_settings import SessionSettings

CAPACITY = 1000
ONE, OTHER = Revision(vllm="0.31.0"), Revision(vllm="0.32.0")
ALL = SessionSettings(together="on", keep="all", keep_share=0.5, keep_s=30.0, give_up_at=0.9)


def engines(*names: str, **more: EngineSeen) -> dict[str, EngineSeen]:
    return {name: EngineSeen(name, kv_tokens=CAPACITY) for name in names} | more


def asked(prompt: Sequence[int], salt: str | None = None) -> Request:
    return Request(seq_id="s", prompt=tuple(prompt), cache_salt=salt)


def turn(
    table: SessionTable, session: str, prompt: Sequence[int], output: Sequence[int], engine: str, now: float = 0.0
) -> list[Action]:
    """One turn, begun and ended."""
    actions, _ = table.begins(session, now)
    return actions + table.ends(session, asked(prompt), output, engine, now)


def kept(table: SessionTable, session: str, tokens: int, now: float, pause: str = "client") -> list[Action]:
    """A turn of that many tokens on ``a``, and the pause after it."""
    first = hash(session) % 10_000
    actions = turn(table, session, range(first, first + tokens - 1), (1, 2), "a", now)
    return actions + table.pauses(session, pause, engines("a", "b"), now)  # type: ignore[arg-type]


def only(actions: list[Action], kind: type[Action]) -> Context:
    (action,) = actions
    assert isinstance(action, kind)
    return action.context


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ALL)


@pytest.mark.parametrize(
    ("headers", "body", "named"),
    [
        ({"x-session-token": "a", "x-session-id": "b"}, "c", "a"),
        ({"x-dynamo-session-id": "d", "x-session-id": "b"}, None, "d"),
        ({"x-claude-code-session-id": "e"}, "c", "e"),
        ({"x-claude-code-session-id": "e", "x-claude-code-agent-id": "f"}, None, "f"),
        ({"x-session-id": ""}, "c", "c"),
        ({}, None, None),
    ],
)
def test_the_name_of_a_session(headers: dict[str, str], body: str | None, named: str | None) -> None:
    request = Request(seq_id="s", prompt=(1,), headers=headers, session=body, user="one of many sessions")
    assert session_named(request) == named


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"nvext": {"agent_context": {"session_id": "run", "trajectory_id": "run:planner"}}}, "run:planner"),
        ({"nvext": {"agent_context": {"session_id": "chain", "session_type_id": "x"}}, "program_id": "p"}, "chain"),
        ({"nvext": {"session_control": {"session_id": "c", "action": "open", "timeout": 30}}}, "c"),
        ({"program_id": "p", "model": "m"}, "p"),
        ({"nvext": {"agent_context": {"session_id": ""}}, "program_id": "p"}, "p"),
        ({"nvext": "x", "program_id": 7}, None),
        ({"nvext": {"agent_context": ["session_id"], "agent_hints": {"priority": 5}}}, None),
        ({"nvext": None}, None),
        ({}, None),
    ],
)
def test_the_name_of_a_session_in_a_body(body: dict[str, Any], named: str | None) -> None:
    assert session_in_body(body) == named


@pytest.mark.parametrize(
    ("control", "closes"),
    [({"session_id": "c", "action": "close"}, True), ({"session_id": "c", "action": "open"}, False), ("close", False),
     ({"action": ["close"]}, False)],
)  # fmt: skip
def test_a_body_may_close_its_session(control: Any, closes: bool) -> None:
    assert closes_session({"nvext": {"session_control": control}}) is closes


def test_a_session_belongs_to_the_engine_that_ended_its_turn(table: SessionTable) -> None:
    assert table.engine_of("s", "decode") is None
    table.begins("s", 0.0)
    table.bind("s", "both", "a")
    table.bind("s", "prefill", "p")
    assert (table.engine_of("s", "decode"), table.engine_of("s", "prefill")) == ("a", "p")
    table.ends("s", asked(range(10)), (1, 2), "b", 1.0)  # it was moved meanwhile
    assert (table.engine_of("s", "both"), table.engine_of("s", "prefill")) == ("b", "p")


def test_what_the_next_turn_finds_is_the_turn_before_up_to_its_last_token(table: SessionTable) -> None:
    turn(table, "s", range(10), (100, 101, 102), "a")
    said = (*range(10), 100, 101, 102)
    assert table.cached("s", "a", asked((*said, 7, 8))) == 12
    assert table.cached("s", "b", asked((*said, 7, 8))) == 0
    assert table.cached("s", "a", asked((*range(10), 55))) == 10  # the template wrote the answer in another way
    assert table.cached("s", "a", asked(said, salt="other")) == 0
    assert table.cached("s", "a", asked((5, 6, 7))) == 0


def test_calls_at_once_have_a_context_each_and_the_oldest_is_dropped(table: SessionTable) -> None:
    for number in range(MOST_CONTEXTS + 1):
        turn(table, "s", (number, 1, 2), (3, 4), "a")
    found = [table.cached("s", "a", asked((number, 1, 2, 3))) for number in range(MOST_CONTEXTS + 1)]
    assert found == [0, *[4] * MOST_CONTEXTS]


def test_a_pause_is_told_with_what_it_waited_for(table: SessionTable) -> None:
    turn(table, "s", range(10), (1, 2), "a", 1.0)
    table.pauses("s", "tool", engines("a"), 2.0)
    assert table.begins("s", 5.5)[1] == ("tool", 3.5)
    assert table.begins("s", 6.0)[1] is None  # a second call of the same turn


def test_only_pauses_for_tools_are_kept_unless_all_are() -> None:
    tools = SessionSettings(together="on", keep="tools", keep_share=0.5)
    for settings, pause, is_kept in ((tools, "client", False), (tools, "tool", True), (ALL, "client", True)):
        table = SessionTable(settings)
        assert bool(kept(table, "s", 100, 0.0, pause)) is is_kept
        assert table.kept == is_kept


def test_a_pin_ends_with_its_time_or_with_the_next_context(table: SessionTable) -> None:
    context = only(kept(table, "s", 100, 0.0), Keep)
    table.kept_since(context, 0.5)
    assert table.look(engines("a"), 30.0) == []
    assert table.look(engines("a"), 30.5) == [GiveUp(context, "a")]
    again = only(kept(table, "t", 100, 31.0), Keep)
    first = hash("t") % 10_000
    assert turn(table, "t", range(first, first + 120), (1, 2), "a", 32.0) == [GiveUp(again, "a")]


def test_no_more_is_kept_than_the_share_and_pauses_for_tools_come_first(table: SessionTable) -> None:
    clients = [only(kept(table, f"client {n}", 200, float(n)), Keep) for n in range(2)]
    assert kept(table, "client 2", 200, 2.0) == []
    found = kept(table, "tool", 300, 3.0, "tool")
    assert found[0] == GiveUp(clients[0], "a")
    assert isinstance(found[1], Keep)
    assert kept(table, "tool 2", 600, 4.0, "tool") == [GiveUp(clients[1], "a")]  # more than the share alone


def test_under_pressure_clients_pauses_are_given_up_first_then_the_longest(table: SessionTable) -> None:
    contexts = {name: only(kept(table, name, 100, now, pause), Keep) for name, now, pause in (
        ("tool old", 1.0, "tool"), ("client new", 3.0, "client"), ("client old", 2.0, "client"), ("tool", 4.0, "tool"),
    )}  # fmt: skip
    for now, context in enumerate(contexts.values()):
        table.kept_since(context, float(now))
    full = engines(a=EngineSeen("a", kv_tokens=CAPACITY, kv_usage=1.05))
    order = ["client new", "client old"]
    assert table.look(full, 5.0) == [GiveUp(contexts[name], "a") for name in order]
    waits = engines(a=EngineSeen("a", kv_tokens=CAPACITY, kv_usage=0.1, waiting=1))
    assert table.look(waits, 6.0) == [GiveUp(contexts["tool old"], "a")]
    assert table.look(waits, 7.0) == [GiveUp(contexts["tool"], "a")]
    assert table.look(waits, 8.0) == []


def test_a_drained_engine_is_emptied_of_those_first_that_wait_for_tools() -> None:
    table = SessionTable(SessionSettings(together="on", keep="none"))
    for number in range(4):
        turn(table, f"s{number}", (number, 1, 2), (3, 4), "a", float(number))
        table.pauses(f"s{number}", "tool" if number == 0 else "client", engines("a"), float(number))
    leaving = engines("b", a=EngineSeen("a", is_open=False, leaving=True, kv_tokens=CAPACITY))
    begun = table.look(leaving, 9.0)
    assert [action.context.session for action in begun] == ["s0", "s3"]
    assert all(isinstance(action, MoveContext) and action.to == "b" for action in begun)
    assert table.engine_of("s0", "decode") == "b"  # a turn that comes now waits for it
    assert table.moving("s0") == [begun[0].context]
    assert table.look(leaving, 9.1) == []
    assert table.moved(begun[0].context, leaving, done=True) == []
    assert table.left_on("a") == 3
    assert [action.context.session for action in table.look(leaving, 9.2)] == ["s2"]
    assert table.cached("s0", "b", asked((0, 1, 2, 3, 9))) == 4


def test_a_context_goes_only_where_its_kv_is_understood() -> None:
    table = SessionTable(SessionSettings(together="on", keep="none"))
    turn(table, "s", range(10), (1, 2), "a")
    leaving = EngineSeen("a", is_open=False, leaving=True, revision=ONE)
    other = EngineSeen("b", revision=OTHER)
    assert table.look({"a": leaving, "b": other}, 1.0) == []
    move = only(table.look({"a": leaving, "b": other, "c": EngineSeen("c", revision=ONE)}, 2.0), MoveContext)
    assert move.to == "c"


def test_a_move_that_failed_leaves_a_context_that_is_computed_again() -> None:
    table = SessionTable(SessionSettings(together="on", keep="none"))
    turn(table, "s", range(10), (1, 2), "a")
    leaving = engines("b", a=EngineSeen("a", is_open=False, leaving=True))
    context = only(table.look(leaving, 1.0), MoveContext)
    assert table.moved(context, leaving, done=False) == []
    assert table.engine_of("s", "decode") == "b"
    assert table.cached("s", "b", asked(range(10))) == 0
    assert table.look(leaving, 2.0) == []


def test_a_pin_follows_its_context(table: SessionTable) -> None:
    context = only(kept(table, "s", 100, 0.0), Keep)
    leaving = engines("b", a=EngineSeen("a", is_open=False, leaving=True, kv_tokens=CAPACITY))
    assert table.look(leaving, 1.0) == [MoveContext(context, "b")]
    assert table.moved(context, leaving, done=True) == [GiveUp(context, "a"), Keep(context)]
    assert context.engine == "b"


@pytest.mark.parametrize("end", ["drains", "is removed"])
def test_a_pin_does_not_follow_its_context_to_an_engine_that_leaves_during_the_move(
    table: SessionTable, end: str
) -> None:
    turn(table, "s", range(10), (1, 2), "a")
    context = only(
        table.look(engines("b", a=EngineSeen("a", is_open=False, leaving=True, kv_tokens=CAPACITY)), 1.0), MoveContext
    )
    drained = {"b": EngineSeen("b", is_open=False, leaving=True, kv_tokens=CAPACITY)} if end == "drains" else {}
    stays = engines("a", "c", **drained)  # the drain of ``a`` is undone
    assert table.pauses("s", "tool", stays, 2.0) == [Keep(context)]
    assert table.moved(context, stays, done=True) == [GiveUp(context, "a")]
    assert table.kept == 0
    # What is on an engine that drains goes on; what is on one that has left is gone.
    assert table.left_on("b") == (end == "drains")
    assert [type(action) for action in table.look(stays, 3.0)] == [MoveContext] * (end == "drains")


def test_an_engine_that_stops_does_not_wait_for_pins_that_nothing_can_take(table: SessionTable) -> None:
    context = only(kept(table, "s", 100, 0.0), Keep)
    assert table.look({"a": EngineSeen("a", is_open=False, leaving=True, kv_tokens=CAPACITY)}, 1.0) == [
        GiveUp(context, "a")
    ]


def test_a_turn_that_comes_back_to_a_drained_engine_has_its_context_moved_first() -> None:
    table = SessionTable(SessionSettings(together="on", keep="none"))
    turn(table, "s", range(10), (1, 2), "a")
    turn(table, "s", (7, 7, 7), (1, 2), "a")
    leaving = engines("b", a=EngineSeen("a", is_open=False, leaving=True))
    table.begins("s", 1.0)
    (move,) = table.arrives("s", asked((*range(10), 1, 5)), leaving)
    assert isinstance(move, MoveContext)
    assert move.context.num_tokens == 11


def test_sessions_are_forgotten_by_age_number_tokens_and_with_their_engine() -> None:
    settings = SessionSettings(together="on", keep="none", ttl_s=10.0, most=2, tokens=100)
    table = SessionTable(settings)
    for number in range(3):
        turn(table, f"s{number}", (number, *range(39)), (1, 2), "a", float(number))
    assert [table.engine_of(f"s{number}", "decode") for number in range(3)] == [None, "a", "a"]
    turn(table, "s2", range(90), (1, 2), "a", 3.0)
    assert table.cached("s1", "a", asked((1, *range(39)))) == 0  # its tokens made room; it still belongs to its engine
    assert table.engine_of("s1", "decode") == "a"
    table.look(engines("b"), 4.0)
    assert table.left_on("a") == 0
    table.look(engines("b"), 20.0)
    assert len(table) == 0


class Sessions(RuleBasedStateMachine):
    """Any order of turns, pauses, drains and ends of moves: pins and moves stay within their limits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(SessionSettings(
            together="on", keep="all", keep_share=0.3, keep_s=20.0, most=5, tokens=2000, ttl_s=50.0,
        ))  # fmt: skip
        self.names = {"a", "b", "c"}
        self.leaving: set[str] = set()
        self.now = 0.0
        self.running = Counter[str]()
        self.pins = dict[Context, str]()
        self.moves = dict[Context, str]()

    @property
    def engines(self) -> dict[str, EngineSeen]:
        return {
            name: EngineSeen(name, name not in self.leaving, True, name in self.leaving, CAPACITY, 0.5)
            for name in self.names
        }

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Keep):
                assert action.context not in self.pins
                assert action.context.engine in self.names - self.leaving
                self.pins[action.context] = action.context.engine
            elif isinstance(action, GiveUp):
                assert self.pins.pop(action.context) == action.engine
            else:
                assert action.context not in self.moves
                assert action.to in self.names - self.leaving
                self.moves[action.context] = action.context.engine

    @rule(session=st.sampled_from("stuvwxyz"), tokens=st.integers(2, 400), engine=st.sampled_from("abc"))
    def turn(self, session: str, tokens: int, engine: str) -> None:
        actions, _ = self.table.begins(session, self.now)
        self.act(actions)
        request = asked(range(tokens))
        self.act(self.table.arrives(session, request, self.engines))
        self.act(self.table.ends(session, request, (1, 2, 3), engine, self.now))

    @rule(session=st.sampled_from("stuvwxyz"), pause=st.sampled_from(("tool", "client")))
    def pause(self, session: str, pause: str) -> None:
        self.act(self.table.pauses(session, pause, self.engines, self.now))  # type: ignore[arg-type]

    @rule(name=st.sampled_from("abc"))
    def drain(self, name: str) -> None:
        self.leaving ^= {name}

    @rule(name=st.sampled_from("abc"))
    def come_or_go(self, name: str) -> None:
        self.names ^= {name}

    @rule(seconds=st.floats(0.0, 30.0))
    def look(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.table.look(self.engines, self.now))
        # Nothing stays pinned on an engine that has left or drains: a pin there ends with the moves that are under way.
        staying, moved = self.names - self.leaving, {*self.moves.values()}
        assert all(at in staying or at in moved for at in self.pins.values())

    @precondition(lambda self: self.moves)
    @rule(done=st.booleans())
    def move_ends(self, *, done: bool) -> None:
        context = next(iter(self.moves))
        del self.moves[context]
        self.act(self.table.moved(context, self.engines, done=done))

    @precondition(lambda self: self.pins)
    @rule()
    def pin_is_lost(self) -> None:
        context, _ = self.pins.popitem()
        self.table.not_kept(context)

    @rule(session=st.sampled_from("stuvwxyz"))
    def over(self, session: str) -> None:
        self.act(self.table.over(session))

    @invariant()
    def pins_are_those_that_were_decided_and_within_the_share(self) -> None:
        assert self.table.kept == len(self.pins)
        for name in self.names:
            assert sum(context.num_tokens for context, at in self.pins.items() if at == name) <= 0.3 * CAPACITY

    @invariant()
    def few_leave_an_engine_at_once_except_for_turns(self) -> None:
        assert all(context.to is not None for context in self.moves)
        assert len(self.table) <= 5

    @invariant()
    def the_tokens_that_are_remembered_are_within_their_limit(self) -> None:
        assert self.table._tokens == sum(context.num_tokens for context in self.table._contexts())
        assert self.table._tokens <= 2000 + 403 * len(self.moves)


TestSessions = Sessions.TestCase
