"""The admin routes: engines, programs and running sequences are shown and changed here.

All act on the state that this router's processes share; answers and errors are JSON. Traces may be of requests that any
of the processes served. Planners get the requests of the last minutes, without their text, and the state of the
engines; they report their plans here for others to read. Engines join and leave with the fleet's secret. vLLM's own
routes for adapters act on the whole fleet here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from tercet import protocol
from tercet.decisions.planning import PlannerReport
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.fleet.adapters import has
from tercet.fleet.policy_views import SeenRequests, observed_engines
from tercet.programs import migrate_context
from tercet.protocol import BadRequest, Forbidden, Role, RouterFailed, TercetError, UnknownSequence
from tercet.protocol.content import MultiModalFeatures
from tercet.protocol.engine import ReportsLeases
from tercet.protocol.headers import BEHIND_HEADER
from tercet.protocol.names import require_text
from tercet.protocol.spans import LeaseReport
from tercet.protocol.wire import (
    API_PREFIX,
    MEMBERS,
    JoinCall,
    LoadAdapterCall,
    MoveCall,
    Name,
    ReplaceAdapterCall,
    Salt,
    decode_call,
)
from tercet.router.observe.request_traces import MOST_LISTED, RequestTrace, TraceQuestion
from tercet.router.page.watch import recent_rates
from tercet.router.serve.moves import MoveRecord, pass_on
from tercet.router.serve.plans import NamedFiles, Plan, Source
from tercet.router.serve.service import Service, Version
from tercet.router.state import joined_members
from tercet.router.state.fleet_state import FleetState
from tercet.router.state.shared_state import SharedState
from tercet.settings import EngineAddress
from tercet.settings.fleet_settings import DEFAULT_CLASS, ObjectiveClass, Objectives
from tercet.settings.process_settings import LOGS_VARIABLE
from tercet.wire.callers import require_digest
from tercet.wire.serving.http_server import error_response, json_response
from tercet.wire.serving.server_access import ADMITTED, PROVED

logger = logging.getLogger("tercet.router")
MOST_DIGITS = 18  # of a number in a query; Python refuses to read thousands of them


def whole_number(text: str) -> int | None:
    """Return the number in a query's text; None if it is not a number from 0 on."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


class TercetRoute(APIRoute):
    """A route that answers with Tercet's errors; the application's handlers would turn them into server failures."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                self.require(request)
                return await handle(request)
            except TercetError as error:
                return error_response(error, None)
            except OSError as error:  # such as a full disk
                logger.error("%s %s failed: %s", request.method, request.url.path, error)
                why = error.strerror or type(error).__name__
                failed = RouterFailed(f"the router failed while it served this request: {why}; its log says where")
                return error_response(failed, None)

        return answer

    def require(self, request: Request) -> None:
        """Raise if the request may not be served here."""


class AdminRoute(TercetRoute):
    """A route for operators."""

    def require(self, request: Request) -> None:
        if ADMITTED not in request.scope:  # the router's check of access has not seen this request
            raise Forbidden("this route accepts only requests that came through the router")


def shared_of(request: Request) -> SharedState:
    """Return the state that the router's processes share."""
    return request.app.state.tercet


def fleet_of(request: Request) -> EngineFleet:
    """Return the fleet of this process."""
    return shared_of(request).service.fleet


def files_of(request: Request) -> NamedFiles:
    """Return the files that a request may name."""
    return request.app.state.tercet_files


def asked_by(request: Request) -> str:
    """Return the origin of a change (method, path and client address), for the log."""
    client = request.client.host if request.client is not None else "this machine"
    return f"{request.method} {request.url.path} from {client}"


def json_answer(value: Any, status: int = 200, behind: Sequence[str] = ()) -> Response:
    """Return a response with ``value`` as JSON.

    ``behind`` lists the processes that share the fleet and have not applied a change; a header carries the list.
    """
    answer = json_response(value, status)
    if behind:  # a header carries printable ASCII without line breaks
        printable = "".join(char if char.isprintable() else " " for char in "; ".join(behind))
        answer.headers[BEHIND_HEADER] = " ".join(printable.split()).encode("ascii", "backslashreplace").decode()
    return answer


routes = APIRouter(prefix=API_PREFIX, tags=["tercet"], route_class=AdminRoute)


# ---- programs and scheduling ---------------------------------------------------------------------------------------


@routes.get("/program")
async def program(request: Request) -> Response:
    """Show the programs that serve requests; a request may name another one."""
    return json_answer(programs_shown(shared_of(request).service))


@routes.put("/program")
async def set_program(request: Request) -> Response:
    """Set the programs that serve requests from now on; the body is a :class:`~tercet.router.serve.plans.Plan`."""
    shared = shared_of(request)
    plan = decode_call(await request.body(), Plan)
    # Loaded here first: a plan that does not load is refused, and no other process ever sees it.
    behind = await shared.use_program(plan, asked_by(request), load_arm=files_of(request).load_arm)
    return json_answer(programs_shown(shared.service), behind=behind)


def programs_shown(service: Service) -> dict[str, Any]:
    """Return the programs in use, their failures, and the previous programs."""
    routing = service.routing
    return {
        **version_shown(routing.current),
        "failures_in_a_row": dict(routing.failures),
        "previous": None if routing.previous is None else version_shown(routing.previous),
        "returned": routing.returned,
    }


def version_shown(version: Version) -> dict[str, Any]:
    """Return one version of the programs, as JSON values."""
    plan = version.plan
    one = {} if plan.program is None else {"program": plan.program, "args": plan.args}
    return {"version": version.number, **one, **msgspec.to_builtins(plan)}


class SchedulingCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/scheduling``: the path of a scheduling file on the router's machine, or its content.

    If ``content`` is given, no file is read, and ``file`` is only a name for the content.
    """

    file: str
    content: Source | None = None

    def __post_init__(self) -> None:
        require_text(self.file, "file")


@routes.get("/scheduling")
async def scheduling(request: Request) -> Response:
    """Show the scheduling file in use and its profiles."""
    return json_answer(_scheduling(shared_of(request)))


@routes.put("/scheduling")
async def set_scheduling(request: Request) -> Response:
    """Set the scheduling file for picks from now on, or load the same file again."""
    shared = shared_of(request)
    call = decode_call(await request.body(), SchedulingCall)
    behind = await shared.use_scheduling(
        call.file, asked_by(request), content=call.content, load=files_of(request).load_scheduling
    )
    return json_answer(_scheduling(shared), behind=behind)


def _scheduling(shared: SharedState) -> dict[str, Any]:
    scheduling, in_use = shared.service.fleet.scheduling, shared.state.scheduling
    return {
        "file": None if in_use is None else in_use.file,
        **({} if in_use is None or in_use.content is None else {"content": in_use.content}),
        "profiles": {
            name: {
                "filters": [type(plugin).__name__ for plugin in profile.filters],
                "scorers": {type(scorer).__name__: weight for scorer, weight in profile.scorers},
                "picker": type(profile.picker).__name__,
            }
            for name, profile in scheduling.profiles.items()
        },
        "by_role": dict(scheduling.by_role),
        "deciders": list(scheduling.deciders),
    }


# ---- sequences, moves and traces -----------------------------------------------------------------------------------


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
    # The same pattern that programs call: an operator's copy has their leases, limits and records.
    sent = await migrate_context(FleetView(fleet_of(request)), prefix, call.source, call.destination)
    if sent is None:
        return json_answer({"begin": len(call.prompt), "end": len(call.prompt), "bytes": 0})
    return json_answer({"begin": sent.begin, "end": sent.end, "bytes": sent.bytes})


@routes.get("/sequences")
async def sequences(request: Request) -> Response:
    """List the sequences that this process runs; with ``?engine=NAME`` only those that this engine generates."""
    running, engine = shared_of(request).service.sequences, request.query_params.get("engine")
    now = time.monotonic()
    return json_answer(
        [
            {
                "seq_id": each.request.seq_id, "program": each.program, "engine": each.engine, "state": each.state,
                "attempt": each.attempt, "moves": each.moves, "prompt_tokens": each.request.num_tokens,
                "tokens": len(each.tokens), "seconds": now - each.began,
            }
            for each in (running if engine is None else running.on(engine))
        ]
    )  # fmt: skip


@routes.post("/sequences/{seq_id:path}/move")
async def move_sequence(request: Request, seq_id: str) -> Response:
    """Move a running sequence to another engine; answers with the record of the move when that engine generates.

    If another process runs the sequence, the proposal is passed on to that process, and the answer is 202.
    """
    call, service = decode_call(await request.body(), MoveCall), shared_of(request).service
    try:
        sequence = service.sequences.named(seq_id)
    except UnknownSequence:
        # Accepted, not done: the move is listed by the process that runs the sequence.
        await pass_on(service.fleet, seq_id, call.destination, call.reason)
        return json_answer({"accepted": True}, 202)
    return json_answer(move_shown(await service.moves.move(sequence, call.destination, call.reason)))


@routes.get("/moves")
async def moves(request: Request) -> Response:
    """List the moves of this process, oldest first; with ``?since=NUMBER`` only those after the move NUMBER."""
    since = _since(request, "a move")
    return json_answer([move_shown(move) for move in shared_of(request).service.moves.since(since)])


@routes.get("/contexts")
async def contexts(request: Request) -> Response:
    """List what became of the most wanted contexts of engines that left: a record for each, oldest first.

    With ``?since=NUMBER`` only those after the record NUMBER. They are of this process; without warm start none.
    """
    since, hot = _since(request, "a record"), shared_of(request).service.hot_contexts
    return json_answer([] if hot is None else [msgspec.to_builtins(each) for each in hot.since(since)])


def _since(request: Request, what: str) -> int:
    given = request.query_params.get("since", "0")
    number = whole_number(given)
    if number is None:
        raise BadRequest(f"since: {given[:40]!r} is not a number; give the number of {what}", "since")
    return number


def move_shown(move: MoveRecord) -> dict[str, Any]:
    """Return the record of a move, with the bytes of all its stages."""
    return {**msgspec.to_builtins(move), "bytes": move.bytes}


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


# Seconds for which an engine's stories of leases are awaited: a trace is shown without them, too.
LEASES_SECONDS = 1.0


async def _leases(fleet: EngineFleet, trace: RequestTrace) -> list[LeaseReport]:
    """Return the lives of the request's leases, in order, as engines tell them that answer in time."""

    async def leases_of(engine: ReportsLeases, name: str, seq_id: str) -> list[LeaseReport]:
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
    able = [(engine, *each) for each in asked if isinstance(engine := engines.get(each[0]), ReportsLeases)]
    # At once: a frozen engine then costs one timeout, and not one for each lease.
    found = await asyncio.gather(*(leases_of(*each) for each in able))
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
    given = request.query_params.get("window", str(WINDOW_S))
    try:
        window = float(given)
    except ValueError:
        window = 0.0
    if not 0 < window <= LONGEST_WINDOW_S:
        raise BadRequest(
            f"window: {given!r} is not a number of seconds above 0 and up to {LONGEST_WINDOW_S:g}", "window"
        )
    shared, fleet = shared_of(request), fleet_of(request)
    service, now = shared.service, fleet.costs.clock()
    seen = service.seen
    if seen is None:
        # From the first call on only: a router without a planner keeps no list of requests.
        seen = service.remember(SeenRequests(LONGEST_WINDOW_S, service.attainments.objectives, fleet.costs.clock))
        fleet.costs.watch()
        fleet.knowledge.start_reports()
    return json_answer(
        {
            "pid": os.getpid(),
            "processes": shared.reports.processes(),
            "now": now,
            "since": seen.since,
            "objectives": objectives_shown(shared),
            "program": service.routing.current.plan.program,
            "args": dict(service.routing.current.plan.args),
            # In the order of the fields of ``ObservedRequest``.
            "arrivals": [
                [each.at, each.prompt_tokens, each.output_tokens, each.ended, each.blocks, each.block_size, each.met]
                for each in seen.arrivals(now, window)
            ],
            "engines": [
                {name: getattr(each, name) for name in each.__dataclass_fields__}
                | {"draining": fleet.member(each.name).draining}
                for each in observed_engines(fleet, shared.reports.lines())
            ],
        }
    )


@routes.get("/planner")
async def planner(request: Request) -> Response:
    """Show the planner's last plans, each with its forecast and the load that followed; null without a report."""
    return json_answer(await shared_of(request).planner.newest())


@routes.put("/planner")
async def report(request: Request) -> Response:
    """Store a planner's report of its last plans; the body is a `PlannerReport`."""
    await shared_of(request).planner.store(decode_call(await request.body(), PlannerReport))
    return json_answer({})


@routes.get("/status")
async def status(request: Request) -> Response:
    """Show whether this router serves, models, programs, objectives, rates and engines, and this process's moves."""
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
            "recent": msgspec.to_builtins(await recent_rates(shared.traces)),
            "engines": [engine_shown(member, shared) for member in fleet_of(request).members],
            "moves": [move_shown(move) for move in shared.service.moves.since(0) if move.outcome == "under_way"],
        }
    )


# ---- engines, adapters and roles -----------------------------------------------------------------------------------


class RoleCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/engines/{name}/role``."""

    role: Role


@routes.get("/engines")
async def engines(request: Request) -> Response:
    """List every engine: name, URL, role, sequences in flight, and its last report with its age in seconds."""
    return json_answer([engine_shown(member, shared_of(request)) for member in fleet_of(request).members])


@routes.post("/engines")
async def add_engine(request: Request) -> Response:
    """Add an engine after it has answered; the body is an :class:`~tercet.settings.EngineAddress`."""
    address = decode_call(await request.body(), EngineAddress)
    behind = await shared_of(request).add(address, asked_by(request))
    return _one(request, address.name, behind, 201)


@routes.delete("/engines/{name}")
async def remove_engine(request: Request, name: str) -> Response:
    """Remove an engine; running sequences on it finish."""
    shared = shared_of(request)
    # Before the removal: the answer describes the member.
    gone = engine_shown(fleet_of(request).member(name), shared)
    return json_answer(gone, behind=await shared.change(lambda state: state.without_member(name), asked_by(request)))


@routes.post("/engines/{name}/drain")
async def drain_engine(request: Request, name: str) -> Response:
    """Stop picking an engine; its running sequences move to other engines, or finish."""
    return await _changed(request, name, lambda state: state.with_draining(name, True))


@routes.delete("/engines/{name}/drain")
async def undrain_engine(request: Request, name: str) -> Response:
    """Pick a drained engine again."""
    return await _changed(request, name, lambda state: state.with_draining(name, False))


@routes.put("/engines/{name}/role")
async def set_role(request: Request, name: str) -> Response:
    """Change the role of an engine."""
    role = decode_call(await request.body(), RoleCall).role
    return await _changed(request, name, lambda state: state.with_role(name, role))


async def _changed(request: Request, name: str, change: Callable[[FleetState], FleetState]) -> Response:
    return _one(request, name, await shared_of(request).change(change, asked_by(request)))


def _one(request: Request, name: str, behind: Sequence[str], status: int = 200) -> Response:
    return json_answer(engine_shown(fleet_of(request).member(name), shared_of(request)), status, behind)


def engine_shown(member: Member, shared: SharedState) -> dict[str, Any]:
    """Return the state of an engine in this process; ``in_flight`` counts for all processes that share the fleet.

    The last report of an engine that does not answer is out of date, and not shown. ``restarts`` are those that this
    process has noticed, and ``met_at`` is when it first met the present start.
    """
    everywhere = shared.reports.engines()[member.name]
    last = shared.service.fleet.knowledge.loads.last(member.name) if everywhere.reachable else None
    # The path of its log, if `tercet up` started both it and this router: each start has its own log.
    folder = os.environ.get(LOGS_VARIABLE, "")
    names = [f"{member.name}-{member.restarts + 1}.log"] * (member.restarts > 0) + [f"{member.name}.log"]
    paths = [os.path.join(folder, name) for name in names if folder]
    log = next((path for path in paths if os.path.isfile(path)), "")
    return {
        "name": member.name, "url": member.url, "role": member.role, "reachable": everywhere.reachable,
        "refused": member.refused, "draining": member.draining, "stopping": member.stopping, "paused": member.paused,
        "in_flight": everywhere.in_flight,
        "report": None if last is None else {"age": last[1], **msgspec.structs.asdict(last[0])},
        "labels": dict(member.labels), "adapters": sorted(member.adapters),
        "vllm": member.revision.vllm, "tercet": member.revision.tercet, "weights": member.revision.weights,
        "restarts": member.restarts, "met_at": member.since or None, "log": log,
    }  # fmt: skip


@routes.put(MEMBERS + "{name}")
async def join_fleet(request: Request, name: str) -> Response:
    """Make the calling engine a member, or keep it one; the body is a :class:`~tercet.protocol.wire.JoinCall`."""
    body = await request.body()
    # The signature of the call covers the body's digest, so a recorded header cannot carry another body.
    require_digest(body, request.scope.get(PROVED))
    return json_answer(await joined_members.join(shared_of(request), name, decode_call(body, JoinCall)))


@routes.delete(MEMBERS + "{name}/{uid}")
async def leave_fleet(request: Request, name: str, uid: str) -> Response:
    """Remove the start ``uid`` of an engine, which leaves the fleet."""
    require_digest(await request.body(), request.scope.get(PROVED))
    return json_answer(await joined_members.leave(shared_of(request), name, uid))


# vLLM's own routes, which act on the whole fleet here.
vllms = APIRouter(tags=["tercet"], route_class=AdminRoute)


class VLLMLoadCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of vLLM's ``POST /v1/load_lora_adapter``, with the fields that a fleet supports."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class VLLMUnloadCall(msgspec.Struct, frozen=True):
    """Body of vLLM's ``POST /v1/unload_lora_adapter``."""

    lora_name: Name


@routes.get("/adapters")
async def adapters(request: Request) -> Response:
    """List the LoRA adapters of this fleet: name, path and digest, and the engines that have each."""
    return json_answer(_adapters(fleet_of(request)))


@routes.post("/adapters")
async def load_adapter(request: Request) -> Response:
    """Serve a LoRA adapter after every engine has loaded it from this path on the engine's machine."""
    call = decode_call(await request.body(), LoadAdapterCall)
    return await _serve_adapter(request, call.name, call.path, replaces=False)


@routes.put("/adapters/{name:path}")
async def replace_adapter(request: Request, name: str) -> Response:
    """Replace a LoRA adapter on every engine by the files at this path, unless requests use the adapter."""
    call = decode_call(await request.body(), ReplaceAdapterCall)
    return await _serve_adapter(request, name, call.path, replaces=True)


@routes.delete("/adapters/{name:path}")
async def unload_adapter(request: Request, name: str) -> Response:
    """Stop accepting requests for a LoRA adapter; running sequences that use it continue."""
    return await _unload_adapter(request, name)


async def _serve_adapter(request: Request, name: str, path: str, replaces: bool) -> Response:
    # A request names its adapter as its model: equal names could not be distinguished.
    if name in request.app.state.tercet_models:
        raise BadRequest(f"name: {name!r} is a name of the base model; choose another name for the adapter", "name")
    of_fleet = shared_of(request).adapters
    behind = await (of_fleet.replace if replaces else of_fleet.load)(name, path, asked_by(request))
    shown = next(each for each in _adapters(fleet_of(request)) if each["name"] == name)
    return json_answer(shown, 200 if replaces else 201, behind)


async def _unload_adapter(request: Request, name: str) -> Response:
    behind = await shared_of(request).adapters.unload(name, asked_by(request))
    return json_answer({"name": name, "unloaded": True}, behind=behind)


def _adapters(fleet: EngineFleet) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "path": adapter.path,
            "digest": adapter.digest,
            "engines": [member.name for member in fleet.members if has(member.adapters, adapter)],
        }
        for name, adapter in fleet.adapters.items()
    ]


@vllms.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter on every engine; answers as vLLM does."""
    call = decode_call(await request.body(), VLLMLoadCall)
    await _serve_adapter(request, call.lora_name, call.lora_path, call.load_inplace)
    return Response(f"Success: LoRA adapter '{call.lora_name}' added successfully.")


@vllms.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter from every engine; answers as vLLM does."""
    call = decode_call(await request.body(), VLLMUnloadCall)
    await _unload_adapter(request, call.lora_name)
    return Response(f"Success: LoRA adapter '{call.lora_name}' removed successfully.")


@routes.get("/roles")
async def roles(request: Request) -> Response:
    """Show objectives and how many requests met them; if roles follow the load, also the last decision and changes."""
    shared = shared_of(request)
    keeper = shared.role_keeper
    decision = None if keeper is None else await keeper.decision()
    return json_answer(
        {
            "roles": "fixed" if keeper is None else "auto",
            "objectives": objectives_shown(shared),
            "engines": {member.name: member.role for member in shared.service.fleet.members},
            "decision": None if decision is None else msgspec.to_builtins(decision),
        }
    )


def objectives_shown(shared: SharedState) -> dict[str, Any]:
    """Return the objectives (seconds) and the requests of all processes; ``attainment`` is None before a request ended.

    Each of ``classes`` counts the requests whose ``header`` names it; the top level counts all other requests.
    """
    wanted, counts = shared.service.attainments.objectives, shared.reports.attainment()
    classes = [{"name": each.name, **_attained(each, counts[each.name])} for each in wanted.classes]
    return {**_attained(wanted, counts[DEFAULT_CLASS]), "header": wanted.header, "classes": classes}


def _attained(wanted: Objectives | ObjectiveClass, counts: tuple[int, int]) -> dict[str, Any]:
    ended, met = counts
    return {
        "ttft": wanted.ttft, "tpot": wanted.tpot, "share": wanted.share, "requests": ended, "met": met,
        "attainment": met / ended if ended else None,
    }  # fmt: skip
