"""Policies by their names in the settings: built-in ones, and functions in the user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from tercet.decisions.migration.loaded_engines import Policy
from tercet.decisions.migration.packing import consolidate, defragment, mitigate
from tercet.decisions.migration.policies import balance, prefill_to_decode
from tercet.decisions.migration.selection import Selection
from tercet.decisions.scheduling.registry import load_module, user_file
from tercet.protocol import BadRequest, Role
from tercet.settings import RescheduleSettings

FIELD = "reschedule"


def policies_of(settings: RescheduleSettings) -> tuple[Policy, ...]:
    """Return the policies in the settings, in order; raise :class:`~tercet.protocol.BadRequest` for an unknown one."""
    return tuple(_policy(name, settings) for name in settings.policies)


def _policy(name: str, settings: RescheduleSettings) -> Policy:
    built_in = BUILT_IN.get(name)
    return built_in(settings) if built_in is not None else _from_file(name)


def _from_file(name: str) -> Policy:
    path, colon, function_name = name.rpartition(":")
    if not colon:
        known = ", ".join(BUILT_IN)
        raise BadRequest(f"{FIELD}: there is no policy {name!r}; choose one of {known}, or file.py:function", FIELD)
    function = getattr(load_module(user_file(path, FIELD, Path()), FIELD), function_name, None)
    if not callable(function):
        raise BadRequest(f"{FIELD}: {path} has no function {function_name}", FIELD)
    return cast("Policy", function)  # its results are checked when it is called


def _selection(settings: RescheduleSettings) -> Selection:
    return Selection(settings.order, settings.measure, settings.value)


def _balancing(role: Role, reason: str) -> Callable[[RescheduleSettings], Policy]:
    def made(settings: RescheduleSettings) -> Policy:
        return partial(
            balance, roles=(role,), threshold=settings.threshold, selection=_selection(settings), reason=reason
        )

    return made


BUILT_IN: Mapping[str, Callable[[RescheduleSettings], Policy]] = {
    "prefill_to_decode": lambda settings: prefill_to_decode,
    "decode_load": _balancing("decode", "decode_load"),
    "neutral_load": _balancing("both", "neutral_load"),
    "binpack_mitigation": lambda settings: partial(mitigate, ceiling=settings.ceiling, selection=_selection(settings)),
    "binpack_consolidation": lambda settings: partial(consolidate, ceiling=settings.ceiling),
    "defragment": lambda settings: defragment,
}
