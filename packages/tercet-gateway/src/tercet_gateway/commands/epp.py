"""``tercet epp``: run an endpoint picker for Envoy in the foreground."""

from __future__ import annotations

import msgspec

from tercet.cli.setting_flags import settings_command
from tercet.cli.terminal import note
from tercet.cluster.model import resolve_model
from tercet.cluster.ports import require_free
from tercet.protocol.entry_points import require_extra
from tercet_gateway.gateway_settings import PickerConfig


@settings_command(PickerConfig)
def epp(config: PickerConfig) -> None:
    """Run an endpoint picker, which Envoy asks by external processing for the engine of each request.

    Envoy sends the requests to the engines itself. `deploy/envoy/` has a configuration of Envoy.

    Examples:
    - `tercet epp --engine http://10.0.0.5:8001 --engine http://10.0.0.6:8001`
    - `tercet epp --engine http://10.0.0.5:8001,role=prefill --engine http://10.0.0.6:8001,role=decode`
    - `tercet epp --pool-name qwen`, in a pod of Kubernetes
    - `tercet epp --engine http://10.0.0.5:8001 --scheduling endpoint-picker-config.yaml --render-model ~/models/qwen`
    """
    require_extra("gateway", "tercet epp")
    from tercet_gateway.server import require_usable, serve

    if config.render_model is not None:
        config = msgspec.structs.replace(config, render_model=resolve_model(config.render_model, note))
    require_usable(config)
    ports = {"port": config.port, "metrics-port": config.metrics_port, "grpc-health-port": config.grpc_health_port}
    for setting, port in ports.items():
        if port:
            require_free(config.host, port, setting)
    serve(config)
