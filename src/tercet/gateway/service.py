"""The gRPC service that Envoy asks: one stream for each HTTP request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from tercet.gateway.endpoint_picker import EndpointPicker
from tercet.gateway.exchange import Exchange, ExchangeBroken, refusal
from tercet.gateway.picker_metrics import PickerMetrics
from tercet.gateway.protos import ExternalProcessorServicer, ProcessingRequest, ProcessingResponse
from tercet.protocol import EngineError, TercetError

logger = logging.getLogger("tercet.gateway")


class EndpointPickerService(ExternalProcessorServicer):
    """``envoy.service.ext_proc.v3.ExternalProcessor`` on a :class:`~tercet.gateway.endpoint_picker.EndpointPicker`."""

    def __init__(self, picker: EndpointPicker, metrics: PickerMetrics, max_bytes: int) -> None:
        self._picker = picker
        self._metrics = metrics
        self._max_bytes = max_bytes

    async def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncGenerator[ProcessingResponse]:
        """The answers to one request's messages."""
        exchange = Exchange(self._max_bytes)
        self._metrics.streams.inc()
        try:
            async for message in request_iterator:
                for reply in exchange.receive(message):
                    yield reply
                if exchange.call is not None:
                    endpoints = await self._picker.pick(exchange.call, exchange.candidates)
                    for reply in exchange.picked(endpoints):
                        yield reply
        except TercetError as error:
            self._metrics.failed(error.status)
            yield refusal(error, exchange.path)
        except (ExchangeBroken, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.CancelledError:
            raise
        except Exception:  # a plugin of the user's, which may raise anything: the others go on
            logger.exception("a request could not be picked for")
            self._metrics.failed(EngineError.status)
            yield refusal(EngineError("the endpoint picker failed; its log says how"), exchange.path)
        finally:
            self._metrics.streams.dec()
            if exchange.answer_began:
                self._metrics.served(exchange.served_in)
