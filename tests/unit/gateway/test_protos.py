"""The picker's messages are Envoy's, as xds-protos has them; and spans are exported from the same interpreter."""

# pyright: reportAttributeAccessIssue=false
# Modules made from .proto files have no types.

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pool import Default

from tercet_gateway.protos import MESSAGES, PACKAGE, SERVICE, BodySendMode, HeaderAppendAction

ENVOYS: Sequence[Any] = (base_pb2, external_processor_pb2, http_status_pb2, processing_mode_pb2)
BASE, SERVICES, _, MODES = ENVOYS


def described(field: Any) -> tuple[object, ...]:
    """What of a field counts on the wire, and for code that reads it; enumerations are integers there."""
    kind, message = field.type, field.message_type
    if kind == FieldDescriptor.TYPE_ENUM:
        kind = FieldDescriptor.TYPE_INT32
    oneof = "" if field.containing_oneof is None else field.containing_oneof.name
    inside = () if message is None or not message.GetOptions().map_entry else tuple(map(described, message.fields))
    return field.name, field.number, kind, field.is_repeated, oneof, "" if message is None else message.name, inside


@pytest.mark.parametrize("name", MESSAGES)
def test_each_field_is_envoys(name: str) -> None:
    envoys = next(found for module in ENVOYS if (found := module.DESCRIPTOR.message_types_by_name.get(name)))
    fields = {field.name: described(field) for field in envoys.fields}
    ours = Default().FindMessageTypeByName(f"{PACKAGE}.{name}").fields
    assert ours
    for field in ours:
        assert described(field) == fields[field.name]


def test_numbers_of_enumerations_and_the_service_are_envoys() -> None:
    modes = MODES.ProcessingMode
    assert {each.name: each.value for each in BodySendMode} == {
        name: number for name, number in modes.BodySendMode.items() if name in BodySendMode.__members__
    }
    actions = BASE.HeaderValueOption.HeaderAppendAction
    assert all(actions.Value(each.name) == each.value for each in HeaderAppendAction)
    assert [each.full_name for each in SERVICES.DESCRIPTOR.services_by_name.values()] == [SERVICE]


@pytest.mark.processes
def test_a_picker_exports_spans_and_needs_no_other_messages() -> None:
    code = (
        "import sys, tercet_gateway.server\n"
        "import opentelemetry.exporter.otlp.proto.http.trace_exporter\n"
        "import opentelemetry.exporter.otlp.proto.grpc.trace_exporter\n"
        "sys.exit('envoy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_spans_can_be_exported_beside_all_messages_of_envoy() -> None:
    import opentelemetry.exporter.otlp.proto.http.trace_exporter as exporter

    assert exporter.OTLPSpanExporter
    assert SERVICES.ProcessingRequest
