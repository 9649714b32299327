"""The gRPC service that Envoy calls: one stream for each HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tercet.aio.incoming import LEAST_OF_BODY, SECONDS, Breach
from tercet.fleet.bodies import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.protocol import EngineError, TercetError
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.names import kept_name
from tercet.protocol.spans import span_context_of, span_of, working_in
from tercet.settings.log_lines import lines_of_request
from tercet.wire.serving.answers import breach_error
from tercet_gateway.endpoint_picker import EndpointPicker, Endpoints
from tercet_gateway.exchange import Exchange, ExchangeBroken, refusal
from tercet_gateway.openai_call import OpenAICall
from tercet_gateway.picker_metrics import PickerMetrics
from tercet_gateway.protos import SERVICE, ProcessingRequest, ProcessingResponse

logger = logging.getLogger("tercet.gateway")


class EndpointPickerService:
    """``envoy.service.ext_proc.v3.ExternalProcessor`` on a :class:`~tercet_gateway.endpoint_picker.EndpointPicker`."""

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
        pace = _Pace(request_iterator, exchange)
        self._metrics.streams.inc()
        try:
            with self._bodies.one() as kept:
                async for message in pace.all(kept):
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
        told: dict[str, Any] = {
            "url.path": kept_name(exchange.path), "gen_ai.request.model": kept_name(call.body.model or ""),
        }  # fmt: skip
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

    def __init__(self, messages: AsyncIterator[ProcessingRequest], exchange: Exchange) -> None:
        self._messages = messages
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        # The end of the interval in which the rate is checked, None before the first; and the bytes at its begin.
        self._check_at: float | None = None
        self._held_before = 0

    async def all(self, kept: HeldBody) -> AsyncGenerator[ProcessingRequest]:
        """Yield messages.

        Raises ``TimeoutError`` if none arrives, and :class:`~tercet.protocol.TercetError` for a slow body.
        """
        async with asyncio.timeout(SECONDS):
            message = await anext(self._messages, None)
        while message is not None:
            yield message
            message = await (self._piece(kept) if self._exchange.awaits_pieces else anext(self._messages, None))

    async def _piece(self, kept: HeldBody) -> ProcessingRequest | None:
        """Return the next message while a body arrives; None at the stream's end."""
        patience = asyncio.timeout(None)
        self._check_later(patience)
        try:
            async with kept.until_let_go(), patience:
                return await anext(self._messages, None)
        except TimeoutError:
            raise breach_error(Breach.SLOW_BODY) from None
        finally:
            self._timer.cancel()

    def _check_later(self, patience: asyncio.Timeout) -> None:
        """Call :meth:`_check` at the end of the present interval, which may begin now."""
        if self._check_at is None:
            self._check_at, self._held_before = self._loop.time() + SECONDS, self._exchange.holds
        self._timer = self._loop.call_at(self._check_at, self._check, patience)

    def _check(self, patience: asyncio.Timeout) -> None:
        """End the wait for a message if too little of the body arrived in the interval; begin the next otherwise."""
        if self._exchange.holds - self._held_before < LEAST_OF_BODY:
            patience.reschedule(self._loop.time())
        else:
            self._check_at = None
            self._check_later(patience)
