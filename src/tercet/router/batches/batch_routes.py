"""``/v1/files`` and ``/v1/batches`` of a router, as OpenAI's clients call them, and the task that runs batches."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from tercet.decisions.gaps import Gaps
from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest
from tercet.protocol.headers import BATCHES, FILES
from tercet.protocol.wire import decode_call
from tercet.router.admin.admin_routes import TercetRoute, json_answer, whole_number
from tercet.router.batches.batch_files import LONGEST_METADATA, MOST_METADATA, BatchFiles, FileRecord, page_of
from tercet.router.batches.batch_lines import ENDPOINTS
from tercet.router.batches.batch_runner import BatchRunner
from tercet.router.serve.service import Service
from tercet.router.serve.shutdown import Shutdown
from tercet.settings.fleet_settings import BatchSettings
from tercet.wire.callers import BearerKeys

MOST_LISTED = {FILES: 10_000, BATCHES: 100}
LISTED = {FILES: 10_000, BATCHES: 20}
_WINDOW = re.compile(r"([1-9][0-9]{0,3})(m|h|d)", re.ASCII)
_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}
LONGEST_WINDOW_S = 14 * 24 * 3600
Text = Annotated[str, Meta(max_length=LONGEST_METADATA)]


class AskCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=MOST_METADATA)] | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint: must be one of {', '.join(ENDPOINTS)}", "endpoint")
        self.window()

    def window(self) -> tuple[str, float]:
        """Return the completion window as it is written, and in seconds."""
        found = _WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * _UNITS[found[2]] if found else 0
        if not 0 < seconds <= LONGEST_WINDOW_S:
            raise BadRequest("completion_window: must be a time such as 24h, 90m or 7d, up to 14d", "completion_window")
        return self.completion_window, seconds


class Batches:
    """The batches of one router process: its routes, and the task :meth:`run`.

    Raises :class:`~tercet.protocol.BadRequest` if the directory cannot be written.
    """

    def __init__(
        self, directory: str, settings: BatchSettings, service: Service, shutdown: Shutdown,
        most_step_s: float | None = None,
    ) -> None:  # fmt: skip
        try:
            self.files = BatchFiles(Path(directory), settings.storage)
        except OSError as error:
            raise BadRequest(
                f"batches: cannot use {directory}: {error.strerror}; name a folder that this process may write",
                "batches",
            ) from error
        self._gaps, self._service, self._shutdown = Gaps(settings.running, most_step_s), service, shutdown
        self._installed: asyncio.Future[BatchRunner] = asyncio.get_running_loop().create_future()
        self.keys = BearerKeys(())

    def install(self, app: FastAPI, gate: Gate, keys: BearerKeys) -> None:
        """Add the routes to ``app``, which also serves the requests of batches, behind the clients at ``gate``."""
        app.state.tercet_batches, self.keys = self, keys
        app.router.routes[:0] = routes.routes
        fleet, metrics = self._service.fleet, self._service.metrics
        runner = BatchRunner(self.files, app, gate, fleet, metrics, self._gaps, lambda: self._shutdown.has_begun)
        self._installed.set_result(runner)

    async def run(self) -> None:
        """Run batches until the router shuts down."""
        await (await asyncio.shield(self._installed)).run()


routes = APIRouter(tags=["batches"], route_class=TercetRoute)


def _files_of(request: Request) -> tuple[BatchFiles, str]:
    """Return the files, and the client of a request: a digest of its key; empty on a router without keys."""
    batches: Batches = request.app.state.tercet_batches
    if not batches.keys:
        return batches.files, ""
    shown = request.headers.get("authorization", "").partition(" ")[2].strip()
    return batches.files, hashlib.sha256(shown.encode()).hexdigest()[:32]


# ---- files -----------------------------------------------------------------------------------------------------------


@routes.post(FILES)
async def add_file(request: Request) -> Response:
    """Keep a file with the requests of a batch: a form with ``purpose=batch`` and ``file``."""
    files, owner = _files_of(request)
    try:
        async with request.form(max_files=1, max_fields=8) as form:
            if form.get("purpose") != "batch":
                raise BadRequest("purpose: must be batch; this server keeps no other files", "purpose")
            if unknown := set(form) - {"purpose", "file"}:
                raise BadRequest(f"{min(unknown):.80}: is not known here; send file and purpose", min(unknown))
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise BadRequest("file: is missing; send a JSONL file with one request on each line", "file")
            content, name = await file.read(), file.filename or "batch.jsonl"
    except HTTPException as error:
        raise BadRequest(f"the form cannot be read: {error.detail}") from error
    if not content:
        raise BadRequest("file: is empty; write one request on each line", "file")
    return json_answer((await asyncio.to_thread(files.add_file, owner, name, content)).shown())


@routes.get(FILES)
async def list_files(request: Request) -> Response:
    """List the client's files, newest first."""
    files, owner = _files_of(request)
    query, limit = request.query_params, _limit(request, FILES)
    order: str = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: must be asc or desc", "order")
    found = [
        each for each in await asyncio.to_thread(files.files, owner)
        if query.get("purpose") in (None, each.purpose)
    ]  # fmt: skip
    shown, more = page_of(found[:: 1 if order == "desc" else -1], lambda each: each.id, query.get("after"), limit)
    return json_answer(_listed([each.shown() for each in shown], more))


@routes.get(FILES + "/{file_id}")
async def show_file(request: Request, file_id: str) -> Response:
    """Show a file."""
    return json_answer((await _file(request, file_id)).shown())


@routes.get(FILES + "/{file_id}/content")
async def file_content(request: Request, file_id: str) -> Response:
    """Return the contents of a file."""
    record = await _file(request, file_id)
    path = _files_of(request)[0].content_path(record)
    return FileResponse(path, media_type="application/octet-stream", filename=record.filename)


@routes.delete(FILES + "/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file that no batch reads any more."""
    files, owner = _files_of(request)
    await asyncio.to_thread(files.delete_file, owner, file_id)
    return json_answer({"id": file_id, "object": "file", "deleted": True})


async def _file(request: Request, file_id: str) -> FileRecord:
    files, owner = _files_of(request)
    return await asyncio.to_thread(files.file, owner, file_id)


# ---- batches ---------------------------------------------------------------------------------------------------------


@routes.post(BATCHES)
async def add_batch(request: Request) -> Response:
    """Begin a batch; the body is an :class:`AskCall`."""
    files, owner = _files_of(request)
    asked = decode_call(await request.body(), AskCall)
    if (await _file(request, asked.input_file_id)).purpose != "batch":
        raise BadRequest("input_file_id: is a file of results; upload one with purpose batch", "input_file_id")
    batch = await asyncio.to_thread(
        files.add_batch, owner, asked.input_file_id, asked.endpoint, asked.window(), asked.metadata
    )
    return json_answer(batch.shown())


@routes.get(BATCHES)
async def list_batches(request: Request) -> Response:
    """List the client's batches, newest first."""
    files, owner = _files_of(request)
    found = await asyncio.to_thread(files.batches, owner)
    shown, more = page_of(
        found, lambda each: each.asked.id, request.query_params.get("after"), _limit(request, BATCHES)
    )
    return json_answer(_listed([each.shown() for each in shown], more))


@routes.get(BATCHES + "/{batch_id}")
async def show_batch(request: Request, batch_id: str) -> Response:
    """Show how far a batch has come."""
    files, owner = _files_of(request)
    return json_answer((await asyncio.to_thread(files.batch, owner, batch_id)).shown())


@routes.post(BATCHES + "/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch; the results so far are kept."""
    files, owner = _files_of(request)
    return json_answer((await asyncio.to_thread(files.cancel, owner, batch_id)).shown())


def _limit(request: Request, path: str) -> int:
    given = request.query_params.get("limit")
    limit = LISTED[path] if given is None else whole_number(given)
    if limit is None or not 1 <= limit <= MOST_LISTED[path]:
        raise BadRequest(f"limit: must be a whole number from 1 to {MOST_LISTED[path]}", "limit")
    return limit


def _listed(items: list[dict[str, Any]], more: bool) -> Mapping[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, "has_more": more, **ends}
