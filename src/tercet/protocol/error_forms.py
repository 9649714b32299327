"""Errors in the form of the client's API, which the request's path identifies.

OpenAI's form is that of :meth:`~tercet.protocol.TercetError.to_wire`; Anthropic's and Cohere's clients expect other
forms. In a stream, an error is the last event: OpenAI's error body followed by ``[DONE]``, or an event type of the
other API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Literal, cast

import msgspec

from tercet.protocol.errors import TercetError
from tercet.protocol.headers import RESPONSES

Api = Literal["openai", "responses", "anthropic", "cohere"]
MESSAGES = "/v1/messages"
COHERE = "/cohere/"
# Anthropic's names for statuses; other statuses are an ``api_error``, or an ``invalid_request_error`` below 500.
ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
DONE = b"data: [DONE]\n\n"


def api_of(path: str) -> Api:
    """Return the API that a path belongs to."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return "anthropic"
    if path.startswith(COHERE):
        return "cohere"
    return "responses" if path == RESPONSES or path.startswith(f"{RESPONSES}/") else "openai"


def error_body(path: str, error: TercetError) -> bytes:
    """Return the body of an error answer to a request for ``path``."""
    return in_form(path, error.status, error.to_wire()["error"])


def in_form(path: str, status: int, said: Mapping[str, Any]) -> bytes:
    """Return the error body for ``path``.

    ``said`` is OpenAI's error object (``message``, ``type``, ``param``, ``code``).
    """
    return msgspec.json.encode(_FORMS[api_of(path)](status, said))


def _openai(_status: int, said: Mapping[str, Any]) -> Any:
    return {"error": said}


def _anthropic(status: int, said: Mapping[str, Any]) -> Any:
    return {"type": "error", "error": {"type": anthropic_type(status), "message": said["message"]}}


def _cohere(_status: int, said: Mapping[str, Any]) -> Any:
    return {"message": said["message"]}


_FORMS: Mapping[Api, Callable[[int, Mapping[str, Any]], Any]] = {
    "openai": _openai, "responses": _openai, "anthropic": _anthropic, "cohere": _cohere,
}  # fmt: skip


def anthropic_type(status: int) -> str:
    """Return Anthropic's name for errors with an HTTP status."""
    other = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    return ANTHROPIC_TYPES.get(status, other)


# ---- in streams ----------------------------------------------------------------------------------------------


def last_events(path: str, error: TercetError, before: Mapping[str, Any] | None = None) -> bytes:
    """Return the last events of a stream that fails. ``before``: the last JSON object that it sent, or None."""
    said: Mapping[str, Any] = error.to_wire()["error"]
    api = api_of(path)
    if api == "anthropic":
        return _event("error", _anthropic(error.status, said))
    if api == "responses":
        return _response_failed(said, before or {})
    if api == "cohere":
        failed = {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": said["message"]}}
        return _event("message-end", failed)
    return b"data: " + msgspec.json.encode(_openai(error.status, said)) + b"\n\n" + DONE


def _response_failed(said: Mapping[str, Any], before: Mapping[str, Any]) -> bytes:
    """Return OpenAI's ``error`` event, followed by ``response.failed`` if the failed response is known."""
    last = before.get("sequence_number")
    number = last + 1 if isinstance(last, int) else 0
    error = {"code": said["code"], "message": said["message"], "param": said["param"]}
    events = _event("error", {"type": "error", **error, "sequence_number": number})
    response = before.get("response")
    if isinstance(response, Mapping):
        failed = {
            **cast("Mapping[str, Any]", response),
            "status": "failed",
            "error": {"code": "server_error", "message": said["message"]},
        }
        whole = {"type": "response.failed", "sequence_number": number + 1, "response": failed}
        events += _event("response.failed", whole)
    return events


def _event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(content))
