"""An endpoint picker for traffic that Envoy carries: Envoy calls it for each request (external processing, gRPC).

:mod:`.exchange` implements the protocol without I/O, :mod:`.endpoint_picker` decides with the fleet's state and
scheduling plugins, :mod:`.rendering` makes a prompt's tokens for it, :mod:`.server` assembles ``tercet epp``.
"""

from tercet_gateway.gateway_settings import PickerConfig

__all__ = ["require_usable", "serve"]


def require_usable(config: PickerConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for files that the endpoint picker cannot use."""
    from tercet_gateway.server import require_usable as require_usable_by_picker

    require_usable_by_picker(config)


def serve(config: PickerConfig) -> None:
    """Run the endpoint picker until it is stopped."""
    from tercet_gateway.server import serve as serve_picker

    serve_picker(config)
