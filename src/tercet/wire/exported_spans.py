"""Export of a process's spans, by OpenTelemetry's standard variables; without them nothing is exported.

OpenTelemetry is imported only if the variables ask for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module

from tercet.protocol import BadRequest
from tercet.protocol.entry_points import import_extra
from tercet.protocol.spans import process

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
HTTP, GRPC = "http/protobuf", "grpc"
PATH = "/v1/traces"


def are_spans_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """True if the variables ask for spans. Raises :class:`~tercet.protocol.BadRequest` for an unsupported exporter."""
    if environment.get(DISABLED, "").strip().lower() == "true":
        return False
    wanted = environment.get(EXPORTER, "").strip().lower()
    if wanted not in ("", "none", "otlp"):
        raise BadRequest(f"{EXPORTER}: {wanted!r} is not supported; choose otlp or none", EXPORTER)
    return wanted == "otlp" or (not wanted and any(environment.get(each) for each in (ENDPOINT, TRACES_ENDPOINT)))


def protocol_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the protocol by which spans are sent. Raises :class:`~tercet.protocol.BadRequest` for another one."""
    for name in (TRACES_PROTOCOL, PROTOCOL):
        found = environment.get(name, "").strip().lower()
        if found:
            if found not in (HTTP, GRPC):
                raise BadRequest(f"{name}: {found!r} is not supported; choose {HTTP} or {GRPC}", name)
            return found
    return HTTP


def endpoint_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the full URL to which spans are sent, for processes that get it by a flag."""
    found = environment.get(TRACES_ENDPOINT, "").strip()
    if found:
        return found
    base = environment.get(ENDPOINT, "").strip().rstrip("/")
    if protocol_of(environment) == GRPC:
        return base or "http://localhost:4317"
    return f"{base or 'http://localhost:4318'}{PATH}"


@contextmanager
def exporting_spans(service: str, attributes: Mapping[str, str] | None = None) -> Generator[None]:
    """Export this process's spans in this context, if the variables ask for it.

    Raises :class:`~tercet.protocol.BadRequest` for unsupported values of the variables, and without the packages.
    """
    # A process exports once, also if a router and an engine of one process both ask for it.
    if not are_spans_wanted() or process.sink is not None:
        yield
        return
    module = f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol_of() == GRPC else 'http'}.trace_exporter"
    import_extra("opentelemetry.sdk.trace", "OTEL_*")
    try:
        exporter = import_module(module)
    except ModuleNotFoundError:
        exporter = import_extra(module, "OTEL_*")
    except ImportError as error:  # such as after xds-protos has overwritten files with older ones
        raise BadRequest(
            "OTEL_*: another package has overwritten opentelemetry-proto, so its exporter does not work; restore it "
            "with: pip install --force-reinstall --no-deps opentelemetry-proto",
            "OTEL_*",
        ) from error
    from tercet.wire.otel import OtelSpans

    sink = process.sink = OtelSpans(service, attributes or {}, exporter.OTLPSpanExporter())
    try:
        yield
    finally:
        process.sink = None
        sink.close()
