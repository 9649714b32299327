"""The verbs over HTTP, as JSON or as MessagePack: one struct per call. Unknown fields are refused.

Fields with default values are left out: an engine of an earlier version, which lacks a field, accepts the calls that do
not need it.

``prompt`` is a list of token ids, or text that the engine tokenises. ``sampling_params`` hold vLLM's ``SamplingParams``
by field name. ``adapter`` names a LoRA adapter that the engine has; None is the base model. An engine refuses a call if
its adapter of that name has another digest than ``adapter_digest``. ``mm_features`` are the images and other features
for which the prompt has placeholder tokens, without their data in calls that compute nothing.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from tercet.protocol.addresses import KVAddrInfo, Reservation
from tercet.protocol.content import MultiModalFeatures
from tercet.protocol.errors import BadRequest, Conflict, EngineUnreachable, from_wire
from tercet.protocol.headers import INCARNATION_HEADER
from tercet.protocol.json_text import UNREADABLE, in_utf8, read_json, unwritable_field
from tercet.protocol.names import MemberRole, require_adapter_name, require_text, require_uid

API_PREFIX = "/tercet/v1"
JSON, MSGPACK = "application/json", "application/msgpack"
# Range of token ids that vLLM's arrays and its tokenizers accept.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# Range of priorities that vLLM's own messages can carry.
LEAST_PRIORITY, MOST_PRIORITY = -(2**63), 2**63 - 1
Priority = Annotated[int, msgspec.Meta(ge=LEAST_PRIORITY, le=MOST_PRIORITY)]
# Number of characters of a cache salt that vLLM accepts.
LONGEST_SALT = 1024
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Salt = Annotated[str, msgspec.Meta(max_length=LONGEST_SALT)]
Digest = Annotated[str, msgspec.Meta(max_length=256)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Prompt = str | Sequence[TokenId]


class SequenceCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a call of a verb says of its sequence: its id, and all that its KV depends on."""

    prompt: Prompt
    seq_id: Name
    cache_salt: Salt | None = None
    adapter: Name | None = None
    adapter_digest: Digest = ""
    mm_features: MultiModalFeatures = ()


class PrepRecvCall(SequenceCall, frozen=True, kw_only=True):
    """Body of ``POST /tercet/v1/prep_recv``. ``ttl`` (seconds) may shorten the engine's own lease time.

    With ``lease``, that open lease of the same sequence is extended: the prompt begins with the lease's prompt.
    """

    end: int | None = None
    ttl: Annotated[float, msgspec.Meta(gt=0)] | None = None
    lease: Name | None = None


class PrepRecvAnswer(Reservation, frozen=True, kw_only=True):
    """Answer of ``prep_recv``. ``ttl`` is the time in seconds after which the lease ends by itself."""

    ttl: float


class RemoteSendCall(SequenceCall, frozen=True, kw_only=True):
    """Body of ``POST /tercet/v1/remote_send``; the answer is a :class:`~tercet.protocol.types.Sent`.

    With ``sample`` the first output token is sampled here and comes with the answer. With ``cached_only`` the longest
    cached whole blocks of the range are sent, and nothing is computed. The two layouts determine which rank writes to
    which rank of the receiver. ``background`` is that of :class:`StartGenerateCall`.
    """

    kv_addr_info: KVAddrInfo
    begin: int
    end: int | None = None
    sample: bool = False
    cached_only: bool = False
    sampling_params: Mapping[str, Any] = {}
    priority: Priority = 0
    background: bool = False


class RouterAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of a router for token streams (``host:port``), and the ``key`` that it accepts from this engine only."""

    address: Name
    key: Name


class StreamDestination(RouterAddress, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destination of one sequence's outputs: ``number`` is the router's number for it, which is never used again."""

    number: Annotated[int, msgspec.Meta(ge=0)]


class ConnectCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/connect``: connect to a router, and send token streams and reports there."""

    router: RouterAddress


class StartGenerateCall(SequenceCall, frozen=True, kw_only=True):
    """Body of ``POST /tercet/v1/start_generate``; the answer is an :class:`~tercet.protocol.types.Output`.

    With ``stream`` the answer is a stream of server-sent events, one :class:`~tercet.protocol.types.Output` each. With
    a ``router`` the answer is ``{"accepted": true}``, and the router receives the outputs (:mod:`tercet.wire.streams`).
    A ``background`` sequence gets what others leave: it is in no step of the engine while another one waits or is in
    its prompt, lengthens other steps little, and is preempted first.
    """

    begin: Annotated[int, msgspec.Meta(ge=0)] = 0
    output: list[TokenId] = []
    stream: bool = True
    router: StreamDestination | None = None
    sampling_params: Mapping[str, Any] = {}
    priority: Priority = 0
    background: bool = False


class AbortCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/abort``: end all work of this engine for ``seq_id``."""

    seq_id: Name


class MoveCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/sequences/{seq_id}/move``: the ``destination`` is an engine's name in its fleet.

    A router moves a sequence that it runs; an engine passes the proposal on to the router that has the sequence.
    """

    destination: Name
    reason: Name = "asked"


class ReleaseCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/release``: end a lease; KV received under it stays as prefix cache."""

    lease: Name


class ReleaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``release``: the whole blocks among tokens ``[0, valid_end)`` of the prompt are prefix cache now."""

    valid_end: int


class LoadAdapterCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /tercet/v1/adapters``: a name for the LoRA adapter at ``path``, on the engine's machine."""

    name: str
    path: Path

    def __post_init__(self) -> None:
        require_adapter_name(self.name)
        require_text(self.path, "path")


class ReplaceAdapterCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/adapters/{name}``: the name stands for the LoRA adapter at ``path`` from now on."""

    path: Path

    def __post_init__(self) -> None:
        require_text(self.path, "path")


class JoinCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``PUT /tercet/v1/members/{name}``: an engine at ``url`` joins the router's fleet, or stays in it.

    ``uid`` differs for each start of the engine. ``leaving``: the engine gets no new sequences, and running ones move.
    """

    url: str
    uid: str
    role: MemberRole = "both"
    leaving: bool = False

    def __post_init__(self) -> None:
        require_uid(self.uid, longest=64)


class Joined(msgspec.Struct, frozen=True):
    """Answer to a :class:`JoinCall`: the number of sequences that all processes of the router run on the engine."""

    in_flight: int


MEMBERS = "/members/"
"""Path of members below ``/tercet/v1``. Only the fleet's secret opens it."""


C = TypeVar("C")
_FIELD = re.compile(r"field `([^`]+)`")
_PATH = re.compile(r"at `\$\.?([^`\[]*)")


def require_incarnation(named: str | None, own: str) -> None:
    """Raise :class:`~tercet.protocol.errors.Conflict` if a call names another incarnation than the engine's ``own``."""
    if named is not None and named != own:
        raise Conflict(
            f"the call is for an earlier start of this engine, whose incarnation is now {own}", INCARNATION_HEADER
        )


def encode_call(call: msgspec.Struct) -> tuple[bytes, str]:
    """Return a call's body and content type: MessagePack if it has tensors (base64 in JSON), else JSON.

    Raises :class:`~tercet.protocol.errors.BadRequest` for text and numbers that cannot be encoded.
    """
    try:
        # Pictures in base64 would be a third larger, and cost more to decode than to send.
        if any(feature.data for feature in getattr(call, "mm_features", ())):
            return msgspec.msgpack.encode(call), MSGPACK
        return msgspec.json.encode(call), JSON
    except (UnicodeEncodeError, OverflowError) as error:
        fields = {name: getattr(call, name) for name in call.__struct_fields__}
        field = next((name for name, value in fields.items() if unwritable_field(value) is not None), None)
        raise BadRequest(f"{field}: has text or numbers that cannot be sent to an engine: {error}", field) from error


def decode_call(body: bytes, kind: type[C], form: str = JSON) -> C:
    """Parse a call's body in the form that :mod:`tercet.protocol.request_checks` has decided.

    Raises :class:`~tercet.protocol.errors.BadRequest` whose ``param`` names the field.
    """
    # The form comes from the header, never from the body: a body cannot choose its parser.
    is_packed = form == MSGPACK
    try:
        return msgspec.msgpack.decode(body, type=kind) if is_packed else msgspec.json.decode(in_utf8(body), type=kind)
    except UNREADABLE as error:
        # Not JSON at all, or text that cannot be encoded.
        if not is_packed and not isinstance(error, msgspec.ValidationError):
            read_json(in_utf8(body))  # it names the field with invalid text
        field = field_of(error)
        where = f"{field}: " if field else ""
        raise BadRequest(f"{where}{error}", field) from error


def large_field_of(call: msgspec.Struct) -> str:
    """Return the name of the field that makes a call large."""
    return "mm_features" if getattr(call, "mm_features", ()) else "prompt"


def field_of(error: Exception) -> str | None:
    """Return the field that one of the ``UNREADABLE`` errors names, or None."""
    found = _FIELD.search(str(error)) or _PATH.search(str(error))
    return found.group(1) if found and found.group(1) else None


def answer_of_router(url: str, status: int, content: bytes, kind: Any = Any) -> Any:
    """Return the JSON answer of the router at ``url`` as ``kind``; raise the error in it.

    Raises :class:`~tercet.protocol.EngineUnreachable` if another server answered.
    """
    try:
        if status < 400:
            return msgspec.json.decode(content, type=kind)
        body = msgspec.json.decode(content, type=dict[str, Any])
        _ = body["error"]  # which errors of other servers lack
    except (KeyError, *UNREADABLE) as error:
        raise EngineUnreachable(f"the server at {url} is not a router: HTTP {status}", "url") from error
    raise from_wire(status, body)


def network_reason(error: BaseException) -> str:
    """Return why a server did not answer, such as ``Connection refused``, without the address of the call."""
    # Before OSError, of which it is a subclass: its number is not one of the system.
    if isinstance(error, (ssl.SSLError, ssl.CertificateError)):
        detail = getattr(error, "verify_message", "") or getattr(error, "reason", "")
        return f"TLS: {detail or 'no secure connection'}"
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, socket.gaierror):
        return "cannot resolve its host name"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
