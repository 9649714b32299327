"""Flags that have another name now: given, they end a script with the new one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class _Renamed(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        parser.error(f"{option_string} is now {self.metavar}")


def refuse_renamed(parser: argparse.ArgumentParser, **names: str) -> None:
    """Refuse flags by their old names, each with its new one."""
    for old, new in names.items():
        parser.add_argument(f"--{old}", action=_Renamed, metavar=new, nargs="?", help=argparse.SUPPRESS)
