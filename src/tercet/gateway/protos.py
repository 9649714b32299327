"""The messages of Envoy's external processing and of gRPC health, from packages whose modules have no types."""

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    ExternalProcessorStub,
    add_ExternalProcessorServicer_to_server,
)
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

__all__ = [
    "BodyMutation",
    "BodyResponse",
    "CommonResponse",
    "ExternalProcessorServicer",
    "ExternalProcessorStub",
    "HeaderMap",
    "HeaderMutation",
    "HeaderValue",
    "HeaderValueOption",
    "HeadersResponse",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "HealthStub",
    "HttpBody",
    "HttpHeaders",
    "HttpTrailers",
    "ImmediateResponse",
    "ProcessingMode",
    "ProcessingRequest",
    "ProcessingResponse",
    "ProtocolConfiguration",
    "StreamedBodyResponse",
    "Struct",
    "TrailersResponse",
    "add_ExternalProcessorServicer_to_server",
    "add_HealthServicer_to_server",
    "health",
]
