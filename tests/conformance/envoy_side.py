"""Envoy's side of external processing: sends what Envoy sends for one HTTP request, and collects what it is told."""

# pyright: reportAttributeAccessIssue=false, reportMissingModuleSource=false
# Modules made from .proto files have no types.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.struct_pb2 import Struct

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
PREFILLER = "x-prefiller-host-port"
LONGEST_PIECE = 64 * 1024
DUPLEX, BUFFERED, NO_BODY = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.NONE
PARTIAL, STREAMED = ProcessingMode.BUFFERED_PARTIAL, ProcessingMode.STREAMED
MODES = {"full-duplex": DUPLEX, "buffered": BUFFERED, "partial": PARTIAL, "streamed": STREAMED, "none": NO_BODY}


@dataclass
class Verdict:
    """What Envoy would do: refuse with ``status``, or go on with the headers set and removed and with ``body``."""

    status: int = 0
    refusal: bytes = b""
    refusal_headers: dict[str, str] = field(default_factory=dict[str, str])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    removed: list[str] = field(default_factory=list[str])
    metadata: str | None = None
    namespaces: set[str] = field(default_factory=set[str])
    clears_route: bool = False
    body: bytes = b""
    pieces: list[int] = field(default_factory=list[int])
    ended: bool = False
    trailers: bool = False
    told_together: bool = False
    is_duplex: bool = False
    answer_headers: list[str] = field(default_factory=list[str])
    order: list[str] = field(default_factory=list[str])

    @property
    def endpoints(self) -> list[str]:
        """The ordered destinations."""
        return self.headers.get(DESTINATION, "").split(",")

    def note(self, reply: ProcessingResponse) -> str:
        """What a reply says; returns its kind."""
        kind = reply.WhichOneof("response") or ""
        self.order.append(kind)
        fields = reply.dynamic_metadata.fields
        self.namespaces |= set(fields)
        before = set(self.headers)
        if "envoy.lb" in fields:
            self.metadata = fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        if kind == "immediate_response":
            refusal = reply.immediate_response
            self.status, self.refusal = refusal.status.code, refusal.body
            self.refusal_headers = _headers(refusal.headers.set_headers)
        elif kind in ("request_headers", "request_body"):
            self._note_common(getattr(reply, kind).response, of_body=kind == "request_body")
        elif kind == "response_headers":
            changes = reply.response_headers.response.header_mutation
            self.answer_headers += [*_headers(changes.set_headers), *changes.remove_headers]
        elif kind == "request_trailers":
            self.trailers = True
        if DESTINATION in self.headers and DESTINATION not in before:
            self.told_together = "envoy.lb" in fields
        return kind

    def _note_common(self, common: CommonResponse, of_body: bool) -> None:
        assert common.status == CommonResponse.CONTINUE
        self.headers |= _headers(common.header_mutation.set_headers)
        self.removed += [name.lower() for name in common.header_mutation.remove_headers]
        self.clears_route |= common.clear_route_cache
        streamed = common.body_mutation.streamed_response
        if common.body_mutation.HasField("streamed_response"):
            assert not self.ended, "a piece of body after its end"
            self.body += streamed.body
            self.pieces.append(len(streamed.body))
            self.ended = streamed.end_of_stream
        else:
            assert not common.body_mutation.WhichOneof("mutation"), "the body is changed"
            assert not (of_body and self.is_duplex), "in full duplex Envoy takes streamed pieces and nothing else"


def _headers(options: Sequence[Any]) -> dict[str, str]:
    for option in options:
        assert not option.header.value, "Envoy ignores `value` where it takes `raw_value`"
    return {option.header.key.lower(): option.header.raw_value.decode() for option in options}


def _struct(fields: Mapping[str, Sequence[str] | str]) -> Struct:
    made = Struct()
    for key, value in fields.items():
        made[key] = value if isinstance(value, str) else list(value)
    return made


class EnvoySide:
    """One picker's channel; each :meth:`request` is one HTTP request on a stream of its own.

    An answer may take ``patience`` seconds.
    """

    def __init__(self, channel: grpc.aio.Channel, patience: float = 10.0) -> None:
        self._stub = ExternalProcessorStub(channel)
        self.patience = patience

    @asynccontextmanager
    async def stream(self, mode: int, waits: bool = True) -> AsyncGenerator[Stream]:
        """A stream, cancelled at its end if it has not ended by itself, as Envoy does when a client leaves.

        ``waits`` is what Envoy says of itself: whether it shows a body only once its headers are answered.
        """
        call = self._stub.Process()
        stream = Stream(call, mode, waits, self.patience)
        reader = asyncio.create_task(stream.collect())
        try:
            yield stream
        finally:
            call.cancel()
            reader.cancel()
            await asyncio.wait({reader})

    async def request(
        self,
        body: bytes | None,
        mode: int = DUPLEX,
        headers: Mapping[str, str] | None = None,
        path: str = "/v1/completions",
        chunk: int = 60_000,
        candidates: Sequence[str] | str | None = None,
    ) -> Verdict:
        """One request up to where it goes on to the engine."""
        async with self.stream(mode) as stream:
            await stream.send_headers(path, headers or {}, ends=body is None, candidates=candidates)
            if body is None or mode == NO_BODY:
                return await stream.until_it_goes_on(has_body=False)
            if mode == DUPLEX:
                await stream.send_body(body, chunk)
                return await stream.until_it_goes_on()
            # In all other modes Envoy waits for the answer to the headers before it shows a body.
            await stream.read()
            pieces = [body[start : start + chunk] for start in range(0, len(body), chunk)] or [b""]
            if mode != STREAMED:
                pieces = [body]
            for number, piece in enumerate(pieces, 1):
                if stream.verdict.status:
                    break
                await stream.send(request_body=HttpBody(body=piece, end_of_stream=number == len(pieces)))
                assert await stream.read() in ("request_body", "immediate_response"), "a body without an answer"
            return stream.verdict


class Stream:
    """The messages of one request."""

    def __init__(self, call: Any, mode: int, waits: bool, patience: float) -> None:
        self.call = call
        self._patience = patience
        self.mode = mode
        self._waits = waits
        self.verdict = Verdict(is_duplex=mode == DUPLEX)
        self._began = False
        self._replies = asyncio.Queue[Any]()

    async def collect(self) -> None:
        """Take replies as they come, to the stream's end or its failure: one that ends loses what nobody has taken."""
        try:
            while True:
                reply = await self.call.read()
                self._replies.put_nowait(reply)
                if reply is grpc.aio.EOF:
                    return
        except grpc.aio.AioRpcError as error:
            self._replies.put_nowait(error)

    async def send(
        self,
        candidates: Sequence[str] | str | None = None,
        served: str | None = None,
        hint: Mapping[str, str] | None = None,
        balancing: Mapping[str, str] | None = None,
        **part: Any,
    ) -> None:
        """A message; the first one says how bodies are sent, those of answers in the same way.

        ``hint`` and ``balancing`` are whole namespaces of metadata: that of candidates, and that of who served.
        """
        message = ProcessingRequest(**part)
        if not self._began:
            told = ProtocolConfiguration(
                request_body_mode=self.mode,
                response_body_mode=self.mode,
                send_body_without_waiting_for_header_response=not self._waits,
            )
            message.protocol_config.CopyFrom(told)
        self._began = True
        said = {
            "envoy.lb.subset_hint": hint if candidates is None else {SUBSET: candidates},
            "envoy.lb": balancing if served is None else {SERVED: served},
        }
        known = {namespace: _struct(fields) for namespace, fields in said.items() if fields is not None}
        if known:
            message.metadata_context.CopyFrom(Metadata(filter_metadata=known))
        # A picker may refuse before it has seen all; Envoy sends no more then, and what was said is read.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self.call.write(message)

    async def send_headers(
        self,
        path: str,
        headers: Mapping[str, str],
        ends: bool = False,
        candidates: Sequence[str] | str | None = None,
        as_text: bool = False,
        hint: Mapping[str, str] | None = None,
    ) -> None:
        """The request's head; ``as_text``, as proxies sent it before they had `raw_value`."""
        pseudo = {":method": "GET" if ends else "POST", ":path": path, ":authority": "gateway", ":scheme": "http"}
        values = [
            HeaderValue(key=name, value=value) if as_text else HeaderValue(key=name, raw_value=value.encode())
            for name, value in {**pseudo, "content-type": "application/json", **headers}.items()
        ]
        shown = HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=ends)
        await self.send(candidates, hint=hint, request_headers=shown)

    async def send_body(self, body: bytes, chunk: int, ends: bool = True) -> None:
        """All of a body, in chunks."""
        starts = range(0, len(body), chunk) or range(1)
        for start in starts:
            last = ends and start == starts[-1]
            await self.send(request_body=HttpBody(body=body[start : start + chunk], end_of_stream=last))

    async def send_trailers(self) -> None:
        """The end of a body that trailers follow."""
        await self.send(request_trailers=HttpTrailers())

    async def send_answer_headers(self, headers: Mapping[str, str]) -> None:
        """The head of an engine's answer."""
        values = [HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
        await self.send(response_headers=HttpHeaders(headers=HeaderMap(headers=values)))

    async def answer_body(self, trailers: bool) -> tuple[bytes, bool]:
        """An answer's body as it goes back in full duplex, up to its end or its trailers; and whether it ended."""
        body, ended = b"", False
        while True:
            reply = await self.reply()
            if reply.WhichOneof("response") == "response_trailers":
                return body, ended
            mutation = reply.response_body.response.body_mutation
            assert mutation.HasField("streamed_response"), "Envoy takes nothing else in this mode"
            assert len(mutation.streamed_response.body) < LONGEST_PIECE
            assert not ended, "a piece of body after its end"
            body += mutation.streamed_response.body
            ended = mutation.streamed_response.end_of_stream
            if ended and not trailers:
                return body, ended

    async def read(self) -> str:
        """The next reply's kind; empty at the stream's end."""
        reply = await self._next(self._patience)
        return "" if reply is grpc.aio.EOF else self.verdict.note(reply)

    async def reply(self) -> ProcessingResponse:
        """The next reply itself."""
        found = await self._next(self._patience)
        assert found is not grpc.aio.EOF, "the stream has ended"
        return found

    async def silent(self, seconds: float = 0.2) -> bool:
        """Whether nothing comes for a while."""
        try:
            await self._next(seconds)
        except TimeoutError:
            return True
        return False

    async def _next(self, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            found = await self._replies.get()
        if isinstance(found, grpc.aio.AioRpcError):
            raise found
        return found

    async def until_it_goes_on(self, has_body: bool = True, trailers: bool = False) -> Verdict:
        """Read until Envoy has what it needs to go on to the engine, or to refuse."""
        verdict = self.verdict
        while not verdict.status:
            if not (self.mode == DUPLEX and has_body):
                whole = "request_headers" in verdict.order
            else:
                whole = verdict.trailers if trailers else verdict.ended
            if whole:
                break
            assert await self.read(), f"the stream has ended after {verdict.order}"
        return verdict
