"""``tercet sidecar``: run a sidecar before one decode engine, in the foreground."""

from __future__ import annotations

from tercet.cli.setting_flags import settings_command
from tercet.cluster.ports import require_free
from tercet_gateway.gateway_settings import SidecarConfig


@settings_command(SidecarConfig)
def sidecar(config: SidecarConfig) -> None:
    """Run a sidecar before an engine: the engines that `x-prefiller-host-port` names prefill its prompts.

    Tercet's engines do this without a sidecar (`tercet engine --prefill-hosts`). Use a sidecar if it must be a separate
    process, or for plain vLLM with NixlConnector. Prefill engines need no sidecar.

    Examples:
    - `tercet sidecar --engine http://127.0.0.1:8001 --port 8000 --prefill-hosts 10.0.0.0/8:8000`
    - `tercet sidecar --engine http://127.0.0.1:8001 --connector nixl --prefill-hosts *.prefill.svc:8000`
    """
    from tercet_gateway.sidecar import require_usable, serve

    require_usable(config)
    if config.port:
        require_free(config.host, config.port)
    serve(config)
