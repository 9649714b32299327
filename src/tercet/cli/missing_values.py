"""Flags without their value: ``--simulate --port 8412`` would take ``--port`` as the value of ``--simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from tercet.protocol import BadRequest


def require_values(command: Any, argv: Sequence[str]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a flag that is followed by another flag instead of its value.

    ``command`` is click's object of the command line ``argv``. Words after ``--`` are not flags of it.
    """
    words = list(takewhile(lambda word: word != "--", argv))
    while words and words[0] in getattr(command, "commands", ()):
        command = command.commands[words.pop(0)]
    takes_value = {name: not each.is_flag for each in command.params for name in _flags(each)}
    for flag, after in pairwise(words):
        if takes_value.get(flag) and (after in takes_value or after == "--help"):
            raise BadRequest(f"{flag}: needs a value, and {after} follows it", flag)


def _flags(parameter: Any) -> list[str]:
    return [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
