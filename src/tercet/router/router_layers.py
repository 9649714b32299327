"""The layers that every request passes before an OpenAI application: the page, :mod:`.router_app`, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.types import ASGIApp

from tercet.fleet.admission import Gate
from tercet.router.observe.exposition import with_metrics
from tercet.router.page.serving_page import with_page
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import RouterApp
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.settings import RouterConfig
from tercet.wire.serving.server_access import RouterKeys

if TYPE_CHECKING:
    from tercet.vllm_plugin.fast_path.entry import FastPath


def put_layers_before(
    app: Starlette, layers: ASGIApp, config: RouterConfig, state: SharedState, keys: RouterKeys, shutdown: Shutdown,
    pooling: PoolingServers, fast: FastPath | None = None,
    around_refusals: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> Gate:  # fmt: skip
    """Make requests of ``app`` pass the router's layers and then ``layers``, its own; return the gate that admits them.

    ``fast`` and ``around_refusals`` are those of :class:`RouterApp`.
    """
    service, apart = state.service, config.admin_listen is not None
    gate = Gate(config.limits, service.fleet, service.metrics)
    front = RouterApp(
        with_metrics(layers, service.fleet, state.traces.exemplars), fast, gate, keys.clients, service.program_called,
        config.max_request_bytes, around_refusals, shutdown, config.access_log, pooling, keys.access, apart,
        state.traces.own, config.client_traces,
    )  # fmt: skip
    app.middleware_stack = with_page(front, state, keys, config.public_name, shutdown, apart)
    return gate
