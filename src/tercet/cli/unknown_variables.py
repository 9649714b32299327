"""Check of environment variables that begin with ``TERCET_`` and are not read, since they may be misspelled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tercet.cluster.up_config import UpConfig
from tercet.protocol.entry_points import SETTINGS, entry_points, provided
from tercet.settings import RouterConfig, Settings, declared
from tercet.settings.declaration import VARIABLE_PREFIX, near
from tercet.settings.process_settings import INTERNAL, OF_COMMANDS, OF_TESTS, VARIABLES

# Variables that Kubernetes sets in every pod of a namespace for each service called tercet or tercet-SOMETHING.
_OF_SERVICES = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
_SERVICE = re.compile(r"(tcp|udp|sctp)://.*|[0-9a-fA-F.:]*|tcp|udp|sctp")
_TEST = "TERCET_TEST_"
_OF_COMMAND: Mapping[str, type[Settings]] = {"up": UpConfig, "router": RouterConfig}
# Packages whose settings are read from the environment too; those of vLLM's plugin and of measurements are not.
_READ_THEM = ("tercet.settings", "tercet.cluster")


def unknown_variables(command: str = "", environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line with a suggestion for each variable that is not read, or that ``command`` reads by another name."""
    known, elsewhere = _known(()), _renamed(command)
    for name in sorted(environment):
        if not name.startswith(VARIABLE_PREFIX) or name.startswith(_TEST) or _is_of_a_service(name, environment):
            continue
        if name in elsewhere:
            yield f"{name} in the environment is ignored: tercet {command} reads {elsewhere[name]}"
            continue
        if name not in known:  # only then settings of packages are imported
            known |= _known(map(_of_package, entry_points(SETTINGS)))
        if name in known:
            continue
        hint = near(name, sorted(known))
        meant = f"; {hint}" if hint.startswith("did you mean") else ""
        yield f"{name} in the environment is ignored: no setting has this name{meant}"


def _is_of_a_service(name: str, environment: Mapping[str, str]) -> bool:
    """True if Kubernetes set the variable: the value is part of an address, and the service's host variable exists."""
    if not _OF_SERVICES.fullmatch(name) or not _SERVICE.fullmatch(environment[name]):
        return False
    if "://" in environment[name]:
        return True
    hosts = [each.removesuffix("_SERVICE_HOST") for each in environment if each.endswith("_SERVICE_HOST")]
    return any(name.startswith(f"{host}_") for host in hosts)


def _of_package(command: str) -> type[Settings]:
    return provided(SETTINGS, command, "", f"tercet {command}")


def _known(of_packages: Iterable[type[Settings]]) -> set[str]:
    kinds = (*of_packages, *(kind for kind in _kinds(Settings) if kind.__module__.startswith(_READ_THEM)))
    settings = {each.env for kind in kinds for each in declared(kind)}
    return settings | {each.name for each in VARIABLES} | INTERNAL | OF_COMMANDS | OF_TESTS


def _renamed(command: str) -> Mapping[str, str]:
    """Return, by their default name, the variables of a command's settings that have a different name."""
    kind = _of_package(command) if command in entry_points(SETTINGS) else _OF_COMMAND.get(command)
    by_rule = (
        {}
        if kind is None
        else {VARIABLE_PREFIX + each.key.upper().replace("-", "_"): each.env for each in declared(kind)}
    )
    return {name: env for name, env in by_rule.items() if name != env}


def _kinds(base: Any) -> Iterator[type[Settings]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
