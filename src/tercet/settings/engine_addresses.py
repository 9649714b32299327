"""Addresses of the fleet's engines, as a command line or a file gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from tercet.protocol import BadRequest, Role
from tercet.protocol.names import require_engine_name, require_text
from tercet.settings.declaration import complaint, key_values
from tercet.settings.discovery_settings import DiscoverySettings
from tercet.settings.urls import require_engine_url

LABEL = "label."
MOST_LABELS_BYTES = 16 * 1024
"""Largest size of an engine's labels, keys and values together, in characters."""


class EngineAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of the fleet: its name, its server's base URL, and the role that the router gives it.

    ``labels`` are given by operators; scheduling plugins may use them. Every source of engines makes this record, which
    raises :class:`~tercet.protocol.BadRequest` for a name, URL or label that cannot be used.
    """

    name: str
    url: str
    role: Role = "both"
    labels: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        require_engine_name(self.name)
        require_engine_url(self.url, "url")
        if not self.labels:
            return
        for key, value in self.labels.items():
            require_text(key, "labels")
            if value:
                require_text(value, f"labels.{key}")
        if sum(len(key) + len(value) for key, value in self.labels.items()) > MOST_LABELS_BYTES:
            raise BadRequest(f"labels: have more than {MOST_LABELS_BYTES} characters", "labels")


def engine_fields(given: Any, index: int) -> Any:
    """Return the fields of an :class:`EngineAddress`.

    ``given`` is a mapping, or a text ``URL[,role=...][,name=...][,label.KEY=...]``. An engine without a name is called
    ``engine-`` and its ``index``. Raises :class:`~tercet.protocol.BadRequest`.
    """
    unnamed = {"name": f"engine-{index}"}
    if not isinstance(given, str):
        return {**unnamed, **cast("dict[str, Any]", given)} if isinstance(given, Mapping) else given
    url, *rest = given.split(",")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"{url!r} is not a URL such as http://127.0.0.1:8001", "url")
    told = key_values(rest, given)
    labels = {key.removeprefix(LABEL): value for key, value in told.items() if key.startswith(LABEL)}
    fields = {key: value for key, value in told.items() if not key.startswith(LABEL)}
    return {**unnamed, "url": url.rstrip("/"), "labels": labels, **fields}


def engine_address(given: str, index: int) -> EngineAddress:
    """Parse one ``--engine`` of a command line; raise :class:`~tercet.protocol.BadRequest`."""
    try:
        return msgspec.convert(engine_fields(given, index), EngineAddress)
    except msgspec.ValidationError as error:
        raise complaint("--engine", EngineAddress, given, error) from None
    except BadRequest as error:
        raise BadRequest(f"--engine: {error.message}", "--engine") from None


def require_unlike(engines: Sequence[EngineAddress], discovery: DiscoverySettings, awaited: bool = False) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if two engines have the same name or URL, or there are no engines.

    An empty list is allowed if discovery is on, or if engines are ``awaited``.
    """
    if not engines and not discovery.is_wanted and not awaited:
        raise BadRequest(
            "engines: there are none; give --engine, or --endpoint-selector, --pool-name or --roster to find engines, "
            "or --await-engines to wait for engines that join",
            "engines",
        )
    twice = [name for name, times in Counter(engine.name for engine in engines).items() if times > 1]
    if twice:
        raise BadRequest(f"engines: two engines are called {twice[0]}; give them different names", "engines")
    again = [url for url, times in Counter(engine.url.rstrip("/") for engine in engines).items() if times > 1]
    if again:
        raise BadRequest(f"engines: {again[0]} is given twice", "engines")
