"""Where Envoy carries the traffic: an endpoint picker that it asks for each request (external processing, gRPC).

:mod:`.exchange` speaks the protocol without I/O, :mod:`.endpoint_picker` decides, on the fleet's state and scheduling
plugins, :mod:`.rendering` shows it a prompt's tokens, :mod:`.server` puts ``tercet epp`` together.
"""

from tercet.settings import PickerConfig

__all__ = ["require_usable", "serve"]


def require_usable(config: PickerConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for files that the endpoint picker cannot use."""
    from tercet.gateway.server import require_usable as require_usable_by_picker

    require_usable_by_picker(config)


def serve(config: PickerConfig) -> None:
    """Run the endpoint picker until it is told to stop."""
    from tercet.gateway.server import serve as serve_picker

    serve_picker(config)
