"""What installed packages add to Tercet: entry points, read without an import of those packages.

``importlib.metadata`` is not used: it imports forty modules, and ``tercet --help`` needs the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

COMMANDS = "tercet.commands"
"""Commands of ``tercet``, by name."""
PARTS = "tercet.parts"
"""Functions and modules that commands use, by the names in these commands."""
SETTINGS = "tercet.settings"
"""Settings of commands, by the command's name."""


@cache
def entry_points(group: str) -> Mapping[str, str]:
    """Return the places, ``module`` or ``module:name``, that installed packages declare in ``group``, by name."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        for file in sorted(Path(folder).glob("*.dist-info/entry_points.txt")):
            section = ""
            for line in file.read_text(encoding="utf-8").splitlines():
                name, equals, place = (each.strip() for each in line.partition("="))
                if line.startswith("["):
                    section = line.strip().strip("[]")
                elif equals and section == group:
                    found.setdefault(name, place)
    return found
