"""A flag that needs a value does not take the next flag as its value, for each flag of each command."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tercet.cli.app import _command, require_values
from tercet.protocol import BadRequest


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name in getattr(command, "commands", ()):
        yield from commands(command.commands[name], (*path, name))


def flags(command: Any) -> list[tuple[str, bool]]:
    """Each long flag, and whether it needs a value."""
    return [(name, not each.is_flag) for each in command.params for name in each.opts if name.startswith("--")]


def test_no_flag_takes_a_flag_as_its_value() -> None:
    for path, command in commands(_command()):
        for (flag, needs_value), (after, _) in pairwise([*flags(command), ("--help", False)]):
            if needs_value:
                with pytest.raises(BadRequest, match=f"^{flag}: needs a value, and {after} follows it$"):
                    require_values(_command(), [*path, flag, after, "x"])
            else:
                require_values(_command(), [*path, flag, after])


@pytest.mark.parametrize(
    "line",
    [
        "up --simulate smollm2 --port 1", "up --model=--port 1", "engine m -- --max-num-seqs --port", "nothing --port",
        "program p --program-arg a=--port", "bench nothing --fleet --program", "", "up --nope --port",
    ],
)  # fmt: skip
def test_other_lines_are_left_to_the_command(line: str) -> None:
    require_values(_command(), line.split())
