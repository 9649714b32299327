"""Routes for requests: running sequences, their moves and traces; for planners; and the whole state of a router.

Traces may be of requests that any of the router's processes served. Planners get the requests of the last minutes,
without their text, and the state of the engines; they report their plans here for others to read.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet import protocol
from tercet.decisions.planning import PlannerReport
from tercet.fleet import EngineFleet, RunningSequence
from tercet.fleet.policy_views import PrefillLine, SeenRequests, observed_engines
from tercet.programs import migrate_context
from tercet.protocol import BadRequest, TercetError, UnknownSequence
from tercet.protocol.content import MultiModalFeatures
from tercet.protocol.engine import TellsLeases
from tercet.protocol.spans import LeaseReport
from tercet.protocol.wire import MoveCall, Salt, decode_call
from tercet.router.admin.admin_route import AdminRoute, fleet_of, json_answer, shared_of, whole_number
from tercet.router.admin.engines import engine_shown, objectives_shown
from tercet.router.admin.programs import programs_shown
from tercet.router.observe.request_traces import MOST_LISTED, RequestTrace, TraceQuestion
from tercet.router.serve.moves import MoveRecord, pass_on

routes = APIRouter(route_class=AdminRoute)


class MigrateCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/migrate_context``: token ids, and the names of two engines.

    ``mm_features`` have the form that verbs accept, with their data.
    """

    prompt: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    source: str
    destination: str
    cache_salt: Salt | None = None
    adapter: str | None = None
    mm_features: MultiModalFeatures = ()


@routes.post("/migrate_context")
async def move_context(request: Request) -> Response:
    """Copy the KV of a prefix to another engine's cache; answers with the range of tokens and the bytes sent."""
    call = decode_call(await request.body(), MigrateCall)
    seq_id = f"context-{uuid.uuid4().hex}"
    prefix = protocol.Request(
        seq_id=seq_id, prompt=call.prompt, cache_salt=call.cache_salt, adapter=call.adapter,
        mm_features=call.mm_features,
    )  # fmt: skip
    sent = await migrate_context(fleet_of(request), prefix, call.source, call.destination)
    if sent is None:
        return json_answer({"begin": len(call.prompt), "end": len(call.prompt), "bytes": 0})
    return json_answer({"begin": sent.begin, "end": sent.end, "bytes": sent.bytes})


@routes.get("/sequences")
async def sequences(request: Request) -> Response:
    """List the sequences that this process runs; with ``?engine=NAME`` only those that this engine generates."""
    running, engine = shared_of(request).service.sequences, request.query_params.get("engine")
    now = time.monotonic()
    return json_answer([_sequence(found, now) for found in (running if engine is None else running.on(engine))])


@routes.post("/sequences/{seq_id:path}/move")
async def move_sequence(request: Request, seq_id: str) -> Response:
    """Move a running sequence to another engine; answers with the record of the move when that engine generates.

    If another process runs the sequence, the proposal is passed on to that process, and the answer is 202.
    """
    call, service = decode_call(await request.body(), MoveCall), shared_of(request).service
    try:
        sequence = service.sequences.named(seq_id)
    except UnknownSequence:
        await pass_on(service.fleet, seq_id, call.destination, call.reason)
        return json_answer({"accepted": True}, 202)
    return json_answer(move_shown(await service.moves.move(sequence, call.destination, call.reason)))


@routes.get("/moves")
async def moves(request: Request) -> Response:
    """List the moves of this process, oldest first; with ``?since=NUMBER`` only those after the move NUMBER."""
    since = request.query_params.get("since", "0")
    number = whole_number(since)
    if number is None:
        raise BadRequest(f"since: {since[:40]!r} is not a number; give the number of a move", "since")
    return json_answer([move_shown(move) for move in shared_of(request).service.moves.since(number)])


def move_shown(move: MoveRecord) -> dict[str, Any]:
    """Return the record of a move, with the bytes of all its stages."""
    return {**msgspec.to_builtins(move), "bytes": move.bytes}


def _sequence(sequence: RunningSequence, now: float) -> dict[str, Any]:
    return {
        "seq_id": sequence.request.seq_id,
        "program": sequence.program,
        "engine": sequence.engine,
        "state": sequence.state,
        "attempt": sequence.attempt,
        "moves": sequence.moves,
        "prompt_tokens": sequence.request.num_tokens,
        "tokens": len(sequence.tokens),
        "seconds": now - sequence.began,
    }


# Number of traces in a list if the request gives none.
USUAL = 20


@routes.get("/traces")
async def traces(request: Request) -> Response:
    """List the newest requests, running ones first: `?newest=NUMBER`, or `?slowest=NUMBER` for the slowest ones."""
    named = set(request.query_params) - {"newest", "slowest"}
    if named or len(request.query_params) > 1:
        raise BadRequest("newest: give either newest=NUMBER or slowest=NUMBER, and no other parameter", "newest")
    given = request.query_params
    newest, slowest = _number("newest", given.get("newest")), _number("slowest", given.get("slowest"))
    question = TraceQuestion(newest=newest if given else USUAL, slowest=slowest)
    found = await shared_of(request).traces.find(question)
    return json_answer([msgspec.to_builtins(trace) for trace in found])


LEASES_SECONDS = 1.0
"""Seconds for which an engine's stories of leases are awaited: a trace is shown without them, too."""


async def _leases(fleet: EngineFleet, trace: RequestTrace) -> list[LeaseReport]:
    """Return the lives of the request's leases, in order, as engines tell them that answer in time."""

    async def told(engine: TellsLeases, name: str, seq_id: str) -> list[LeaseReport]:
        with suppress(TercetError, TimeoutError):  # it is gone, or an engine that tells no stories
            async with asyncio.timeout(LEASES_SECONDS):
                return [msgspec.structs.replace(each, engine=name) for each in await engine.lease_stories(seq_id)]
        return []

    engines = {member.name: member.engine for member in fleet.members}
    asked = dict.fromkeys(
        (event.engine, sequence.seq_id)
        for sequence in trace.sequences
        for event in (*sequence.events, *sequence.failed)
        if event.verb == "prep_recv"
    )
    able = [(engine, *each) for each in asked if isinstance(engine := engines.get(each[0]), TellsLeases)]
    found = await asyncio.gather(*(told(*each) for each in able))
    return sorted((report for reports in found for report in reports), key=lambda each: each.at)


@routes.get("/traces/{name:path}")
async def trace(request: Request, name: str) -> Response:
    """Show the traces of requests with this `x-request-id`, or with this id of an answer, a sequence or a trace.

    `leases` are the lives of its leases, if engines still tell them.
    """
    found = await shared_of(request).traces.find(TraceQuestion(id=name))
    if not found:
        raise UnknownSequence(
            f"id: no router keeps a trace of {name!r}: the id is wrong, or the trace is too old (trace-requests)", "id"
        )
    leases = await asyncio.gather(*(_leases(fleet_of(request), each) for each in found))
    pairs = zip(found, leases, strict=True)
    return json_answer(
        [msgspec.to_builtins(each) | ({"leases": msgspec.to_builtins(lives)} if lives else {}) for each, lives in pairs]
    )


def _number(name: str, text: str | None) -> int:
    if text is None:
        return 0
    number = whole_number(text)
    if number is None or not 0 < number <= MOST_LISTED:
        raise BadRequest(f"{name}: {text[:40]!r} is not a number from 1 to {MOST_LISTED}", name)
    return number


WINDOW_S, LONGEST_WINDOW_S = 60.0, 600.0


@routes.get("/traffic")
async def traffic(request: Request) -> Response:
    """Show requests of the last ``?window=SECONDS``, since the first such call: times, lengths and hashes of blocks.

    Only requests of this process are listed. Times are seconds of its clock, whose present time is ``now``. A block's
    number is a hash of the tokens up to its end. ``processes`` is the number of processes that share the fleet; the
    engines' waiting prefills are those of all these processes.
    """
    window, shared, fleet = _window(request), shared_of(request), fleet_of(request)
    service, now = shared.service, fleet.costs.clock()
    seen = service.seen
    if seen is None:
        seen = service.remember(SeenRequests(LONGEST_WINDOW_S, service.attainments.objectives, fleet.costs.clock))
        fleet.costs.watch()
        fleet.knowledge.needed()
    lines = {name: PrefillLine(each.waiting_s, each.busy_s) for name, each in shared.reports.engines().items()}
    return json_answer(
        {
            "pid": os.getpid(),
            "processes": shared.reports.processes(),
            "now": now,
            "since": seen.since,
            "objectives": objectives_shown(shared),
            "program": service.routing.current.plan.program,
            "args": dict(service.routing.current.plan.args),
            "arrivals": [_shown(each) for each in seen.arrivals(now, window)],
            "engines": [_engine(each, fleet.member(each.name).draining) for each in observed_engines(fleet, lines)],
        }
    )


def _window(request: Request) -> float:
    given = request.query_params.get("window", str(WINDOW_S))
    try:
        window = float(given)
    except ValueError:
        window = 0.0
    if not 0 < window <= LONGEST_WINDOW_S:
        raise BadRequest(
            f"window: {given!r} is not a number of seconds above 0 and up to {LONGEST_WINDOW_S:g}", "window"
        )
    return window


def _shown(arrival: Any) -> list[Any]:
    """Return an arrival's values in the order of the fields of ``tercet.decisions.planning.ObservedRequest``."""
    return [arrival.at, arrival.prompt_tokens, arrival.output_tokens, arrival.ended, arrival.blocks,
            arrival.block_size, arrival.met]  # fmt: skip


def _engine(engine: Any, draining: bool) -> dict[str, Any]:
    return {name: getattr(engine, name) for name in engine.__dataclass_fields__} | {"draining": draining}


@routes.get("/planner")
async def planner(request: Request) -> Response:
    """Show the planner's last plans, each with its forecast and the load that followed; null without a report."""
    return json_answer(await shared_of(request).planner.newest())


@routes.put("/planner")
async def report(request: Request) -> Response:
    """Store a planner's report of its last plans; the body is a `PlannerReport`."""
    await shared_of(request).planner.tell(decode_call(await request.body(), PlannerReport))
    return json_answer({})


@routes.get("/status")
async def status(request: Request) -> Response:
    """Show whether this router serves, its models, programs, objectives and engines, and this process's moves."""
    shared = shared_of(request)
    refusal = shared.reports.refusal()
    return json_answer(
        {
            "serving": refusal is None,
            "why": "" if refusal is None else refusal.message,
            "models": request.app.state.tercet_models,
            "program": programs_shown(shared.service),
            "objectives": objectives_shown(shared),
            "roles": "fixed" if shared.role_keeper is None else "auto",
            "engines": [engine_shown(member, shared) for member in fleet_of(request).members],
            "moves": [move_shown(move) for move in shared.service.moves.since(0) if move.outcome == "under_way"],
        }
    )
