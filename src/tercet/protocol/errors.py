"""The tree of errors: :class:`TercetError`, and one class for each kind of failure, with its HTTP status.

``code`` is the stable name on the wire, ``status`` the HTTP status. The wire form is the one that OpenAI's API uses:
``{"error": {"message", "type", "param", "code"}}``. The code of a class that is declared with a status is its name in
snake case, so renaming the class changes the wire. Any other class has the code of its base.

Anthropic's and Cohere's clients expect other forms; the request's path identifies the client's API. In a stream, an
error is the last event: OpenAI's error body followed by ``[DONE]``, or an event type of the other API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar, Literal, cast

import msgspec

from tercet.protocol.headers import RESPONSES

LONGEST_MESSAGE = 4096
"""Maximum number of characters of a message, which may quote text of a client or of another process."""
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


class TercetError(Exception):
    """Base of all errors of Tercet. ``param`` names the wrong field, or is None.

    ``blames`` names the engine at fault if it is not the one that was called. ``retry_after`` is the number of seconds
    after which a retry may succeed, if known. ``challenge`` is the challenge for which a caller must prove that it
    knows the fleet's secret.
    """

    code: ClassVar[str] = "tercet_error"
    status: ClassVar[int] = 500
    blames: str | None = None
    retry_after: int | None = None
    challenge: str | None = None

    def __init_subclass__(cls, status: int | None = None) -> None:
        if status is not None:
            cls.code, cls.status = re.sub(r"\B([A-Z])", r"_\1", cls.__name__).lower(), status

    def __init__(self, message: str, param: str | None = None) -> None:
        if len(message) > LONGEST_MESSAGE:
            # The quoted text comes first, the reason and the remedy last.
            # Cut in the middle, so that both are kept.
            message = f"{message[: LONGEST_MESSAGE * 3 // 4]}...{message[-LONGEST_MESSAGE // 4 :]}"
        message = writable(message)
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def exit_code(self) -> int:
        """Exit code of a command: 2 for wrong input, 1 for a failure."""
        return 2 if HTTPStatus.BAD_REQUEST <= self.status < HTTPStatus.INTERNAL_SERVER_ERROR else 1

    def to_wire(self) -> dict[str, Any]:
        """Return the error body of an HTTP answer. Characters that cannot be encoded are escaped."""
        param = None if self.param is None else writable(self.param)
        return {"error": {"message": self.message, "type": type(self).__name__, "param": param, "code": self.code}}


class BadRequest(TercetError, status=400):
    """The caller's input is wrong, and sending it again will not help; ``param`` names the field."""


class Unauthorized(TercetError, status=401):
    """The caller has not shown the key that this server requires."""


class Forbidden(TercetError, status=403):
    """The caller is not allowed to do this from its address, or with the object it names, even with the right key."""


class UnknownEngine(TercetError, status=404):
    """The fleet has no engine of that name."""


class UnknownSequence(TercetError, status=404):
    """The engine has no sequence or lease with this id."""


class UnknownAdapter(TercetError, status=404):
    """The engine, or every engine of the fleet that answers, lacks the LoRA adapter with this name."""


class UnknownModel(TercetError, status=404):
    """No engine here serves a model with this name."""


class UnknownPath(TercetError, status=404):
    """This server has no such path."""


class MethodNotAllowed(TercetError, status=405):
    """This path exists, but not for this HTTP method."""


class RequestTimeout(TercetError, status=408):
    """The client took too long to send its request."""


class Conflict(TercetError, status=409):
    """The name is in use: a seq_id by a reservation or a running request of this engine, or an engine's name.

    Or the call was meant for another start of the engine.
    """


class LayoutMismatch(TercetError, status=409):
    """Two engines cannot use each other's KV; the message names the difference."""


class LeaseEnded(TercetError, status=410):
    """The lease was released, expired or used. Its blocks may have a new owner, so no more is written to them."""


class RequestTooLarge(TercetError, status=413):
    """The request's body has more bytes than this server accepts."""


class UnsupportedMediaType(TercetError, status=415):
    """The request's body has a media type, or an encoding, that this server does not accept."""


class HeadTooLarge(TercetError, status=431):
    """The request line and headers have more bytes than this server accepts."""


class Saturated(TercetError, status=429):
    """The fleet is at its limit; retry after ``retry_after`` seconds.

    ``waited``: the request has already waited for the longest allowed time.
    """

    waited: bool = False

    def __init__(self, message: str, param: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after = retry_after


class DeadlineExceeded(TercetError, status=504):
    """The request took longer than this server allows."""


class ShuttingDown(TercetError, status=503):
    """The router is shutting down: it accepts no new requests, or ends running ones. Another router may serve."""

    retry_after = 5


class NoSpace(TercetError, status=503):
    """The engine cannot reserve this number of blocks now; try another engine, or retry later."""


class GrammarsBusy(TercetError, status=503):
    """The engine could not try this structured output in time; that says nothing about it. Retry, or elsewhere."""

    retry_after = 10


class EngineError(TercetError, status=500):
    """The engine failed while it ran the request."""


class ProgramFailed(TercetError, status=500):
    """The program that served the request has an error in its code."""


class RouterFailed(TercetError, status=500):
    """The router failed while it served the request, because of a bug or of its disk; its log says how."""


class TransferFailed(TercetError, status=502):
    """KV did not arrive: the receiver refused it, disappeared, or took too long."""


class RouterUnreachable(TercetError, status=502):
    """The engine cannot connect to the address of the router that called it, to stream tokens there."""


class EngineUnreachable(TercetError, status=503):
    """The engine's process does not answer."""


class RoleUnavailable(TercetError, status=503):
    """No engine of the required role can be picked, and the fleet's policy does not allow others to replace it."""


class EngineNotReached(EngineUnreachable):
    """The call did not reach the engine, so no part of it has started. The code is that of the base class."""


def writable(text: str) -> str:
    """Return the text with backslash escapes for the characters that cannot be encoded."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_BY_CODE: Mapping[str, type[TercetError]] = {cls.code: cls for cls in (TercetError, *TercetError.__subclasses__())}


def from_wire(status: int, body: Mapping[str, Any]) -> TercetError:
    """Return the error whose :meth:`TercetError.to_wire` is ``body``; for an unknown body, an :class:`EngineError`."""
    found: Any = body.get("error")
    if not isinstance(found, Mapping):
        return EngineError(f"HTTP {status}: {dict(body)!r}")
    detail = cast("Mapping[str, Any]", found)
    message = str(detail.get("message") or f"HTTP {status}")
    param = detail.get("param")
    cls = _BY_CODE.get(str(detail.get("code")))
    # Of a later version, or not of Tercet: the status decides whether sending again may help.
    if cls is None:
        cls = BadRequest if 400 <= status < 500 else EngineError
    return cls(message, str(param) if param is not None else None)


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
    match api_of(path):
        case "anthropic":
            other = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
            error = {"type": ANTHROPIC_TYPES.get(status, other), "message": said["message"]}
            return msgspec.json.encode({"type": "error", "error": error})
        case "cohere":
            return msgspec.json.encode({"message": said["message"]})
        case _:
            return msgspec.json.encode({"error": said})


# ---- in streams ----------------------------------------------------------------------------------------------


def last_events(path: str, error: TercetError, before: Mapping[str, Any] | None = None) -> bytes:
    """Return the last events of a stream that fails. ``before``: the last JSON object that it sent, or None."""
    said: Mapping[str, Any] = error.to_wire()["error"]
    api = api_of(path)
    if api == "anthropic":
        return b"event: error\ndata: %b\n\n" % error_body(path, error)
    if api == "cohere":
        failed = {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": said["message"]}}
        return _event("message-end", failed)
    if api == "openai":
        return b"data: %b\n\n" % error_body(path, error) + DONE
    # The Responses API: an event of the type "error"; clients that follow the response's state need the other one, too.
    last = (before or {}).get("sequence_number")
    number = last + 1 if isinstance(last, int) else 0
    fields = {"code": said["code"], "message": said["message"], "param": said["param"]}
    events = _event("error", {"type": "error", **fields, "sequence_number": number})
    response = (before or {}).get("response")
    if isinstance(response, Mapping):
        why = {"code": "server_error", "message": said["message"]}
        failed = {**cast("Mapping[str, Any]", response), "status": "failed", "error": why}
        whole = {"type": "response.failed", "sequence_number": number + 1, "response": failed}
        events += _event("response.failed", whole)
    return events


def _event(kind: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(content))
