"""Checks before an engine loads its weights: first of its flags, then of its config.

The same checks run again where they protect something: in the connector, and where the verbs are attached.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tercet.protocol import BadRequest
from tercet.vllm_plugin.hooks import require_hooks
from tercet.vllm_plugin.start.loading_stages import log_stages_of_workers
from tercet.vllm_plugin.start.patching import Method, wrap
from tercet.vllm_plugin.start.plugin_settings import parse_settings
from tercet.vllm_plugin.start.refusals import refusing_in_a_sentence
from tercet.wire.serving.server_access import callers_of

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "TercetConnector"
PLUGIN = "tercet"


def check_before_loading() -> None:
    """Make vLLM's servers check Tercet's requirements before they load anything.

    A failed check ends the server with one sentence. Relies on ``EngineArgs.from_cli_args`` getting all flags of a
    server, and on ``create_engine_config`` being called before any process of the engine is started.
    """
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_engine_config", _config_checked)
    wrap(EngineArgs, "from_cli_args", _flags_checked)


def _flags_checked(make: Method, cls: type, args: Namespace) -> Any:
    with refusing_in_a_sentence():
        require_flags(args)
    return make(cls, args)


def _config_checked(create: Method, args: Any, *more: Any, **named: Any) -> VllmConfig:
    config = create(args, *more, **named)
    if is_tercets(config.kv_transfer_config):
        with refusing_in_a_sentence():
            require_config(config)
        log_stages_of_workers(config)
    return config


def require_flags(args: Namespace) -> None:
    """Raise :class:`~tercet.protocol.TercetError` for flags that a server with Tercet's connector cannot have.

    These are: unknown or wrong settings of the connector, KV or verbs that callers on other machines could reach
    without a key, and several API servers. Commands that serve nothing (``vllm bench``, headless nodes) have no verbs.
    """
    transfer: KVTransferConfig | None = getattr(args, "kv_transfer_config", None)
    if transfer is None or not is_tercets(transfer):
        return
    require_hooks("engine")
    settings = parse_settings(transfer.kv_connector_extra_config)
    settings.require_secret_beyond_loopback()
    settings.allowed_prefillers()
    if not hasattr(args, "host") or getattr(args, "headless", False) or not serves_verbs():
        return
    callers_of(args, settings.fleet_secret)
    servers = getattr(args, "api_server_count", None)
    if servers not in (None, 1):
        raise BadRequest(
            f"--api-server-count: is {servers}, and one API server keeps the leases of an engine; set it to 1",
            "--api-server-count",
        )


def require_config(config: VllmConfig) -> None:
    """Raise :class:`~tercet.vllm_plugin.hooks.UnsupportedVLLM` for an engine whose KV could not be moved."""
    from tercet.vllm_plugin.start.requirements import require_supported_config

    require_supported_config(config)


def is_tercets(transfer: KVTransferConfig | None) -> bool:
    """True if an engine moves its KV by Tercet's connector."""
    return transfer is not None and transfer.kv_connector == CONNECTOR


def serves_verbs() -> bool:
    """True if vLLM adds the verbs to its API server, which it does only if ``VLLM_PLUGINS`` names the plugin."""
    import vllm.envs

    return PLUGIN in (vllm.envs.VLLM_PLUGINS or ())
