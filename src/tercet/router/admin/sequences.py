"""Routes that show running sequences and move them, or the KV of a prefix, between engines."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from tercet import protocol
from tercet.fleet import RunningSequence
from tercet.programs import migrate_context
from tercet.protocol import BadRequest, UnknownSequence
from tercet.protocol.content import MultiModalFeatures
from tercet.protocol.wire import MoveCall, Salt, decode_call
from tercet.router.admin.admin_route import AdminRoute, fleet_of, json_answer, shared_of, whole_number
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.proposals import pass_on

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
