"""``tercet model-router``: serve several models at one address, in the foreground."""

from __future__ import annotations

from tercet.cli.setting_flags import settings_command
from tercet.cluster.ports import require_free
from tercet_gateway.gateway_settings import ModelRouterConfig


@settings_command(ModelRouterConfig)
def model_router(config: ModelRouterConfig) -> None:
    """Serve several models at one address: each request goes to the router of the model that it names.

    Each model has its own router, with its own tokenizer, engines, programs, limits and metrics. Several routers of one
    model share its requests by their weights, which `tercet upgrade` shifts.

    Examples:
    - `tercet model-router --router http://127.0.0.1:8001 --router http://127.0.0.1:8002`
    - `tercet model-router --router http://10.0.0.7:8000,weight=9 --router http://10.0.0.8:8000,weight=1`
    """
    from tercet_gateway.model_router import keys_of, serve

    keys_of(config)  # refuses what is open to other machines before anything listens
    if config.port:
        require_free(config.host, config.port)
    serve(config)
