"""Each API's own form of an error, as an answer and as the end of a stream."""

from __future__ import annotations

import errno
import socket
import ssl
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    EngineError,
    EngineUnreachable,
    RequestTooLarge,
    Saturated,
    TercetError,
    Unauthorized,
    UnknownModel,
)
from tercet.protocol.errors import error_body, last_events
from tercet.protocol.sse import EventSplitter, data_of, object_of
from tercet.wire.client.bounded_answers import reason_of


def events_of(text: bytes) -> list[bytes]:
    return EventSplitter().split(text)


def said(path: str, error: TercetError) -> Any:
    return msgspec.json.decode(error_body(path, error))


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/resp_1", "/v1/messages2", "/x"]
)
def test_openais_form(path: str) -> None:
    assert said(path, BadRequest("no", "n")) == {
        "error": {"message": "no", "type": "BadRequest", "param": "n", "code": "bad_request"}
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [(BadRequest("no"), "invalid_request_error"), (Unauthorized("no"), "authentication_error"),
     (UnknownModel("no"), "not_found_error"), (RequestTooLarge("no"), "request_too_large"),
     (Saturated("no"), "rate_limit_error"), (EngineError("no"), "api_error"),
     (EngineUnreachable("no"), "overloaded_error"), (DeadlineExceeded("no"), "timeout_error")],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_form(path: str, error: TercetError, kind: str) -> None:
    assert said(path, error) == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_coheres_form() -> None:
    assert said("/cohere/v2/chat", BadRequest("no")) == {"message": "no"}


def test_the_end_of_a_stream_is_an_event_of_its_api() -> None:
    error = EngineError("it broke")
    chat = events_of(last_events("/v1/chat/completions", error))
    assert [object_of(chat[0]), data_of(chat[1])] == [error.to_wire(), b"[DONE]"]
    (message,) = events_of(last_events("/v1/messages", error))
    assert message.startswith(b"event: error\n")
    assert object_of(message) == said("/v1/messages", error)
    (cohere,) = events_of(last_events("/cohere/v2/chat", error))
    assert object_of(cohere)["delta"] == {"finish_reason": "ERROR", "error": "it broke"}


def test_a_response_that_fails_has_its_last_events_numbered_on() -> None:
    error = EngineError("it broke")
    before = {"sequence_number": 7, "response": {"id": "resp_1", "status": "in_progress", "output": []}}
    first, second = map(object_of, events_of(last_events("/v1/responses", error, before)))
    assert (first["type"], first["sequence_number"], first["message"]) == ("error", 8, "it broke")
    assert (second["type"], second["sequence_number"]) == ("response.failed", 9)
    failed = second["response"]
    assert (failed["id"], failed["status"], failed["error"]["message"]) == ("resp_1", "failed", "it broke")
    (only,) = events_of(last_events("/v1/responses", error))
    assert object_of(only)["sequence_number"] == 0


# Errors of connections, as clients and operators read them.

KEY: Any = cast(Any, SimpleNamespace(host="10.0.0.1", port=8001, ssl=True, is_ssl=True))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 8001)")),
         "Connection refused"),
        (aiohttp.ClientConnectorError(KEY, socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
         "cannot resolve its host name"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError("no")), "TLS: no secure connection"),
        (aiohttp.ServerTimeoutError(), "it took too long"),
        (TimeoutError(), "it took too long"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "Connection reset by peer"),
        (aiohttp.ServerDisconnectedError(), "it closed the connection"),
        (aiohttp.ClientPayloadError("Response payload is not completed"), "Response payload is not completed"),
    ],
)  # fmt: skip
def test_reasons(error: BaseException, said: str) -> None:
    assert reason_of(error) == said


async def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as failed:
                await session.get(f"http://127.0.0.1:{sock.getsockname()[1]}/")
    assert reason_of(failed.value) == "Connection refused"
