"""The messages of Envoy's external processing that the picker reads and writes, and those of gRPC health.

Envoy's messages are declared here: xds-protos, the package with all of them, overwrites files of opentelemetry-proto
and of googleapis-common-protos with older ones, so that spans cannot be exported. The wire format has numbers of
fields, but no names of messages or packages; fields that are not named here are skipped. A test compares all
declarations with xds-protos.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

__all__ = [
    "HealthCheckRequest",
    "HealthCheckResponse",
    "HealthStub",
    "Struct",
    "add_HealthServicer_to_server",
    "health",
]
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PACKAGE = "tercet.ext_proc"
MESSAGES: Mapping[str, str] = {
    "HeaderValue": "string key = 1; string value = 2; bytes raw_value = 3;",
    "HeaderMap": "repeated HeaderValue headers = 1;",
    "HeaderValueOption": "HeaderValue header = 1; int32 append_action = 3;",
    "Metadata": "map Struct filter_metadata = 1;",
    "HttpHeaders": "HeaderMap headers = 1; bool end_of_stream = 3;",
    "HttpBody": "bytes body = 1; bool end_of_stream = 2;",
    "HttpTrailers": "HeaderMap trailers = 1;",
    "ProtocolConfiguration": "int32 request_body_mode = 1; int32 response_body_mode = 2;",
    "ProcessingRequest": """
        oneof request HttpHeaders request_headers = 2; oneof request HttpHeaders response_headers = 3;
        oneof request HttpBody request_body = 4; oneof request HttpBody response_body = 5;
        oneof request HttpTrailers request_trailers = 6; oneof request HttpTrailers response_trailers = 7;
        Metadata metadata_context = 8; bool observability_mode = 10; ProtocolConfiguration protocol_config = 11;
        """,
    "HeaderMutation": "repeated HeaderValueOption set_headers = 1; repeated string remove_headers = 2;",
    "StreamedBodyResponse": "bytes body = 1; bool end_of_stream = 2;",
    "BodyMutation": "oneof mutation bytes body = 1; oneof mutation StreamedBodyResponse streamed_response = 3;",
    "CommonResponse": """
        HeaderMutation header_mutation = 2; BodyMutation body_mutation = 3; bool clear_route_cache = 5;
        """,
    "HeadersResponse": "CommonResponse response = 1;",
    "BodyResponse": "CommonResponse response = 1;",
    "TrailersResponse": "HeaderMutation header_mutation = 1;",
    "HttpStatus": "int32 code = 1;",
    "ImmediateResponse": "HttpStatus status = 1; HeaderMutation headers = 2; bytes body = 3; string details = 5;",
    "ProcessingResponse": """
        oneof response HeadersResponse request_headers = 1; oneof response HeadersResponse response_headers = 2;
        oneof response BodyResponse request_body = 3; oneof response BodyResponse response_body = 4;
        oneof response TrailersResponse request_trailers = 5; oneof response TrailersResponse response_trailers = 6;
        oneof response ImmediateResponse immediate_response = 7; Struct dynamic_metadata = 8;
        """,
}
"""Fields by message, as in ``.proto`` files, except that each member of a oneof names the oneof; keys are strings."""
_FIELD = re.compile(r"(?:(repeated|map|oneof (\w+)) )?(\w+) (\w+) = (\d+);")
_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,  # enumerations too: on the wire they are the same
}


class BodySendMode(IntEnum):
    """The ways in which Envoy sends bodies, by ``ProtocolConfiguration``."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


class HeaderAppendAction(IntEnum):
    """The actions for a header that exists already."""

    OVERWRITE_IF_EXISTS_OR_ADD = 2


def _described() -> Iterator[DescriptorProto]:
    for name, fields in MESSAGES.items():
        message = DescriptorProto(name=name)
        for how, oneof, kind, field, number in _FIELD.findall(fields):
            _add(message, field, int(number), kind, oneof, how in ("repeated", "map"))
            if how == "map":
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind)
                message.field[-1].type_name = f".{PACKAGE}.{name}.{entry.name}"
        yield message


def _add(
    to: DescriptorProto, name: str, number: int, kind: str, oneof: str = "", is_repeated: bool = False
) -> None:  # fmt: skip
    label = FieldDescriptorProto.LABEL_REPEATED if is_repeated else FieldDescriptorProto.LABEL_OPTIONAL
    field = to.field.add(name=name, number=number, label=label)
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".google.protobuf.{kind}" if kind == "Struct" else f".{PACKAGE}.{kind}"
    if oneof:
        if oneof not in [each.name for each in to.oneof_decl]:
            to.oneof_decl.add(name=oneof)
        field.oneof_index = [each.name for each in to.oneof_decl].index(oneof)


_FILE = "tercet/ext_proc.proto"
Default().Add(
    FileDescriptorProto(
        name=_FILE, package=PACKAGE, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name],
        message_type=_described(),
    )
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Return the class of a message."""
    if name not in MESSAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return GetMessageClass(Default().FindMessageTypeByName(f"{PACKAGE}.{name}"))
