"""The gRPC service that Envoy calls: one stream for each HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tercet.aio.incoming import LEAST_OF_BODY, SECONDS, Breach
from tercet.fleet.bodies_held import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.gateway.endpoint_picker import EndpointPicker, Endpoints
from tercet.gateway.exchange import Exchange, ExchangeBroken, refusal
from tercet.gateway.openai_call import OpenAICall
from tercet.gateway.picker_metrics import PickerMetrics
from tercet.gateway.protos import SERVICE, ProcessingRequest, ProcessingResponse
from tercet.protocol import EngineError, TercetError
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.spans import span_context_of, span_of, working_in
from tercet.settings.log_lines import lines_of_request
from tercet.wire.serving.error_answers import breach_error

logger = logging.getLogger("tercet.gateway")


class EndpointPickerService:
    """``envoy.service.ext_proc.v3.ExternalProcessor`` on a :class:`~tercet.gateway.endpoint_picker.EndpointPicker`."""

    def __init__(self, picker: EndpointPicker, metrics: PickerMetrics, max_bytes: int) -> None:
        self._picker = picker
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._bodies = BodiesHeld(LARGEST_AT_ONCE * max_bytes)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler that a gRPC server needs for this service."""
        process = grpc.stream_stream_rpc_method_handler(
            self.process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncGenerator[ProcessingResponse]:
        """Yield the replies to one request's messages."""
        exchange = Exchange(self._max_bytes)
        pace = _Pace(request_iterator)
        self._metrics.streams.inc()
        try:
            with self._bodies.one() as kept:
                async for message in pace.messages(exchange, kept):
                    for reply in exchange.receive(message):
                        yield reply
                    if exchange.holds > kept.size:
                        kept.add(exchange.holds - kept.size)
                    if exchange.call is not None:
                        async with kept.until_let_go():
                            endpoints = await self._pick(exchange, exchange.call)
                        for reply in exchange.picked(endpoints):
                            yield reply
                        kept.forget()
        except TercetError as error:
            self._metrics.failed(error.status)
            yield refusal(error, exchange.path)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no headers arrived within {SECONDS:g} s")
        except (ExchangeBroken, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            raise
        except Exception:  # a user's plugin may raise any error: other requests continue
            with lines_of_request("" if exchange.call is None else exchange.call.headers.get(REQUEST_ID_HEADER, "")):
                logger.exception("picking for a request failed")
            self._metrics.failed(EngineError.status)
            yield refusal(EngineError("the endpoint picker failed; its log has the traceback"), exchange.path)
        finally:
            self._metrics.streams.dec()
            if exchange.answer_began:
                self._metrics.served(exchange.served_in)

    async def _pick(self, exchange: Exchange, call: OpenAICall) -> Endpoints:
        """Pick, with log lines and a span for the request."""
        headers = call.headers
        told: dict[str, Any] = {"url.path": exchange.path, "gen_ai.request.model": call.body.model or ""}
        with (
            lines_of_request(headers.get(REQUEST_ID_HEADER, "")),
            working_in(span_context_of(headers)),
            span_of("pick", told, "server") as place,
        ):
            picked = await self._picker.pick(call, exchange.candidates)
            if place is not None:
                told |= {"tercet.decode": [*picked.decode], "tercet.prefill": picked.prefill}
            return picked


class _Pace:
    """The messages of one stream: the first one must arrive in time, and a buffered body at a minimum rate."""

    def __init__(self, messages: AsyncIterator[ProcessingRequest]) -> None:
        self._messages = messages
        self._look_at: float | None = None
        self._held_before = 0

    async def messages(self, exchange: Exchange, kept: HeldBody) -> AsyncGenerator[ProcessingRequest]:
        """Yield messages.

        Raises ``TimeoutError`` if none arrives, and :class:`~tercet.protocol.TercetError` for a slow body.
        """
        async with asyncio.timeout(SECONDS):
            message = await anext(self._messages, None)
        while message is not None:
            yield message
            message = await (self._piece(exchange, kept) if exchange.awaits_pieces else anext(self._messages, None))

    async def _piece(self, exchange: Exchange, kept: HeldBody) -> ProcessingRequest | None:
        """Return the next message while a body arrives; None at the stream's end."""
        clock = asyncio.get_running_loop().time
        coming = asyncio.ensure_future(anext(self._messages, None))
        try:
            async with kept.until_let_go():
                while not coming.done():
                    if self._look_at is None:
                        self._look_at, self._held_before = clock() + SECONDS, exchange.holds
                    await asyncio.wait({coming}, timeout=self._look_at - clock())
                    if clock() >= self._look_at and not coming.done():
                        if exchange.holds - self._held_before < LEAST_OF_BODY:
                            raise breach_error(Breach.SLOW_BODY)
                        self._look_at = None
            return coming.result()
        finally:
            coming.cancel()
