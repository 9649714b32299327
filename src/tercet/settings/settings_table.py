"""The settings of a class as help and documentation show them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tercet.settings.declaration import Declared, declared

HEADER = "| flag | key | variable | default | |\n| --- | --- | --- | --- | --- |"


def said_of(of: Declared) -> str:
    """What a setting is, with its unit."""
    unit = f" ({of.setting.unit})" if of.setting.unit else ""
    return f"{of.setting.help.rstrip('.')}{unit}."


def settings_table(kind: type[msgspec.Struct], but: Iterable[type[msgspec.Struct]] = ()) -> str:
    """A Markdown table of the settings of ``kind`` that none of the others has."""
    elsewhere = {each.key for other in but for each in declared(other)}
    return "\n".join([HEADER, *(_row(each) for each in declared(kind) if each.key not in elsewhere)])


def _row(of: Declared) -> str:
    default = of.shown_default or ("needed" if of.is_required else "")
    cells = (
        f"`{of.flag} {of.shown_kind}`".replace(" `", "`") if of.flag else "",
        f"`{of.key}`",
        f"`{of.env}`",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} | {default} | {said_of(of)} |"
