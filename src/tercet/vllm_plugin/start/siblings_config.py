"""Other KV connectors in one engine: the setting ``beside``, and the config by which vLLM makes all of them.

Users list siblings of Tercet's connector there, as vLLM's MultiConnector takes its connectors.
vLLM gets a MultiConnector of both kinds from :mod:`tercet.vllm_plugin.siblings`: so all that vLLM decides by the name
``MultiConnector``, such as block sizes, layouts of KV and whether layers are in groups, includes the siblings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from tercet.protocol import BadRequest
from tercet.vllm_plugin.start.plugin_settings import parse_settings

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

CONNECTOR, MULTI = "TercetConnector", "MultiConnector"
SIBLINGS_MODULE = "tercet.vllm_plugin.siblings"
KEY = "beside"
FLAG = "--kv-transfer-config"
LONGEST_REASON = 300


def is_tercets(transfer: KVTransferConfig | None) -> bool:
    """True if an engine moves its KV by Tercet's connector, alone or with siblings."""
    return transfer is not None and (transfer.kv_connector == CONNECTOR or _has_siblings(transfer))


def _has_siblings(transfer: KVTransferConfig) -> bool:
    return transfer.kv_connector == MULTI and transfer.kv_connector_module_path == SIBLINGS_MODULE


def settings_of(transfer: KVTransferConfig | None) -> Mapping[str, Any]:
    """Return the settings of Tercet's connector as users write them; empty without a config."""
    if transfer is None:
        return {}
    extra = transfer.kv_connector_extra_config
    return extra["connectors"][0]["kv_connector_extra_config"] if _has_siblings(transfer) else extra


def with_siblings(transfer: KVTransferConfig) -> KVTransferConfig:
    """Return the config with which vLLM makes Tercet's connector and its siblings; ``transfer`` if there are none.

    Raises :class:`~tercet.protocol.BadRequest` for a sibling that vLLM cannot make, or that is not one connector.
    """
    if transfer.kv_connector != CONNECTOR:
        return transfer
    extra = transfer.kv_connector_extra_config
    beside = parse_settings(extra).beside
    if not beside:
        return transfer
    own = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": {key: value for key, value in extra.items() if key != KEY},
    }
    # Tercet's first: :mod:`tercet.vllm_plugin.siblings` relies on that, and settings_of reads its settings there.
    connectors = [own, *(_checked(f"{FLAG}: {KEY}[{at}]", sibling) for at, sibling in enumerate(beside))]
    return replace(
        transfer,
        kv_connector=MULTI,
        kv_connector_module_path=SIBLINGS_MODULE,
        kv_connector_extra_config={"connectors": connectors},
    )


def _checked(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sibling's config, with both roles unless it names one; vLLM has its class."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    sibling: dict[str, Any] = {"kv_role": "kv_both", **given}
    name = given.get("kv_connector")
    reason = ""
    if not isinstance(name, str) or not name:
        reason = "kv_connector is missing: name a connector of vLLM, or a class in kv_connector_module_path"
    elif name == CONNECTOR:
        reason = f"{name} is the engine's connector already: leave it out"
    elif name == MULTI:
        reason = f"{name} cannot be a sibling: list its connectors in {KEY}"
    elif "engine_id" in given:
        reason = "engine_id is that of the whole config: set it there"
    else:
        try:
            KVConnectorFactory.get_connector_class(KVTransferConfig(**sibling))
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{name}: {'.'.join(map(str, first['loc'])) or 'the config'}: {first['msg']}"
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            reason = f"{name}: {error}: check the name, kv_connector_module_path, and whether its package is installed"
    if reason:
        raise BadRequest(f"{where}: {' '.join(reason.split())[:LONGEST_REASON]}", FLAG)
    return sibling


def require_no_sibling(transfer: KVTransferConfig | None) -> None:
    """Refuse Tercet's connector among those of vLLM's own MultiConnector, at any depth.

    Others may still read blocks that they have not pinned, while a lease gives them to a peer that writes: vLLM's
    offloading connector would keep wrong KV under a right name. Settings and checks of the connector are not found
    there, either. Raises :class:`~tercet.protocol.BadRequest`.
    """
    if transfer is None or _has_siblings(transfer):
        return
    left: list[Any] = [transfer.kv_connector_extra_config]
    while left:
        settings: Any = left.pop()
        children: Any = settings.get("connectors") if isinstance(settings, Mapping) else None
        for child in cast("Sequence[Any]", children) if isinstance(children, Sequence) else ():
            if isinstance(child, Mapping):
                if child.get("kv_connector") == CONNECTOR:
                    raise BadRequest(
                        f"{FLAG}: {CONNECTOR} is among the connectors of a MultiConnector, and it must be the engine's "
                        f"connector itself, because others may read blocks that a peer writes: set kv_connector to "
                        f"{CONNECTOR!r}, and list the others as {KEY} in its kv_connector_extra_config",
                        FLAG,
                    )
                left.append(child.get("kv_connector_extra_config"))
