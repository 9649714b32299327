"""Checks of a router's keys and addresses before anything is loaded; the router repeats them after loading."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tercet.cluster.engine_command import value_of
from tercet.protocol.access import given_key, key_of
from tercet.settings import RouterConfig, RouterSettings
from tercet.settings.variables import API_KEY_VARIABLE
from tercet.wire.serving.server_access import RouterKeys


def require_private_router(config: RouterSettings, inherited: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for unusable keys, and for a router that is open to other machines.

    A router is open if other machines reach it without a key. The check reads the files of keys.
    """
    shown = value_of(config.vllm_args, "--api-key")
    told = key_of(shown or "", "--api-key")
    given = told or key_of(inherited.get(API_KEY_VARIABLE, ""), API_KEY_VARIABLE)
    keys = RouterKeys(config, [given] if given else [])
    if value_of(config.vllm_args, "--uds") is None:
        keys.require_private(config.host, config)
    given_key(shown, "--api-key")  # a router for this machine would start without the key that was meant
    if isinstance(config, RouterConfig):
        keys.require_private_admin(config.admin_address)
