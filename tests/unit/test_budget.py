"""A budget that only falls: the lines and files of Python of each room of the product, and of each package beside it.

A room that grew loses as much elsewhere. A change that makes a room smaller lowers its numbers here; `python -m
tests.unit.test_budget` prints the present ones. A number that is raised, or new, needs a line `Budget: REASON` in the
message of its commit.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.sources import PRODUCT as SOURCE
from tests.sources import ROOT, modules


class Size(NamedTuple):
    """Lines and files of Python."""

    lines: int
    files: int


BUDGET = {
    "__init__": Size(12, 1),
    "aio": Size(1099, 6),
    "cli": Size(4016, 21),
    "cluster": Size(4702, 17),
    "decisions": Size(5043, 21),
    "engine": Size(2385, 9),
    "fleet": Size(5097, 16),
    "logs": Size(417, 1),
    "programs": Size(411, 3),
    "protocol": Size(3717, 17),
    "router": Size(15453, 51),
    "settings": Size(1746, 6),
    "src/tercet, together": Size(64881, 256),
    "store": Size(1359, 7),
    "tercet.lab": Size(42, 1),
    "tercet_bench": Size(3067, 11),
    "tercet_checks": Size(4676, 16),
    "tercet_gateway": Size(5880, 21),
    "tercet_lab": Size(12990, 52),
    "tercet_planner": Size(2163, 10),
    "tercet_ray": Size(1284, 8),
    "transport": Size(6793, 22),
    "vllm_plugin": Size(8191, 39),
    "wire": Size(4440, 19),
}
PRODUCT = "src/tercet, together"
MOST_LINES_OF_THE_FAST_PATH = 2800
# A smaller room need not lower its numbers: other changes of the same hour add a few lines.
SLACK_LINES, SLACK_SHARE, SLACK_FILES = 50, 0.01, 2


def present() -> dict[str, Size]:
    """The size of each room and package, and of all rooms together."""
    lines, files = Counter[str](), Counter[str]()
    for name, path in modules():
        room = name.partition("/")[0].removesuffix(".py")
        for counted in (room, PRODUCT) if path.is_relative_to(SOURCE) else (room,):
            lines[counted] += len(path.read_bytes().splitlines())
            files[counted] += 1
    return {room: Size(lines[room], files[room]) for room in sorted(lines)}


def complaints(found: Mapping[str, Size], budget: Mapping[str, Size]) -> list[str]:
    """What is above its number, and what is so far below that the number must be lowered."""
    said = [f"{room} is in no budget" for room in found.keys() - budget.keys()]
    said += [f"{room} is gone: remove it" for room in budget.keys() - found.keys()]
    for room in found.keys() & budget.keys():
        now, most = found[room], budget[room]
        if now.lines > most.lines or now.files > most.files:
            said.append(
                f"{room} grew to {now.lines} lines in {now.files} files; {most.lines} in {most.files} is the most"
            )
        slack = max(SLACK_LINES, int(SLACK_SHARE * most.lines))
        if now.lines < most.lines - slack or now.files < most.files - SLACK_FILES:
            said.append(f'{room} is smaller: lower its numbers to "{room}": Size({now.lines}, {now.files})')
    return sorted(said)


def test_no_room_grows() -> None:
    said = complaints(present(), BUDGET)
    assert not said, "\n".join(["", *said])


def test_the_fast_path_stays_short() -> None:
    """With the registry of its hooks: what it saves for each token must be worth its lines."""
    openai = SOURCE / "router" / "openai"
    files = [*(openai / "fast_path").rglob("*.py"), openai / "fast_path_hooks.py"]
    assert sum(len(path.read_bytes().splitlines()) for path in files) <= MOST_LINES_OF_THE_FAST_PATH


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Size(1000, 10), []),
        (Size(950, 8), []),
        (Size(1001, 10), ["a grew to 1001 lines in 10 files; 1000 in 10 is the most"]),
        (Size(900, 11), ["a grew to 900 lines in 11 files; 1000 in 10 is the most",
                         'a is smaller: lower its numbers to "a": Size(900, 11)']),
        (Size(949, 10), ['a is smaller: lower its numbers to "a": Size(949, 10)']),
        (Size(1000, 7), ['a is smaller: lower its numbers to "a": Size(1000, 7)']),
    ],
)  # fmt: skip
def test_the_rule_itself(now: Size, said: list[str]) -> None:
    assert complaints({"a": now}, {"a": Size(1000, 10)}) == said


def test_rooms_and_budget_are_the_same() -> None:
    one = {"a": Size(1, 1)}
    assert complaints(one, {}) == ["a is in no budget"]
    assert complaints({}, one) == ["a is gone: remove it"]


HERE = "tests/unit/test_budget.py"
REASON = re.compile(r"^Budget: *\S", re.MULTILINE)


def budget_in(text: str) -> dict[str, Size]:
    """The budget that this file, as it was once, assigns."""
    (given,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUDGET"
    )
    assert isinstance(given, ast.Dict)
    sizes = (each.args for each in given.values if isinstance(each, ast.Call))
    numbers = [Size(*(int(ast.literal_eval(number)) for number in size)) for size in sizes]
    return dict(zip((ast.literal_eval(key) for key in given.keys if key), numbers, strict=True))


def raised(now: Mapping[str, Size], before: Mapping[str, Size], messages: str) -> list[str]:
    """The numbers that rose or are new, unless one of the commits' messages has the reason."""
    if REASON.search(messages):
        return []
    rose = ((room, before.get(room, Size(0, 0)), size) for room, size in now.items())
    return [
        f"{room} rose from {was} to {size}"
        for room, was, size in rose
        if size.lines > was.lines or size.files > was.files
    ]


def git(*arguments: str) -> str | None:
    """What git prints, or None if it does not know."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else None


def test_no_number_is_raised_without_a_reason() -> None:
    """Compared with where the branch began, or on the main branch with the commit before."""
    head, began = git("rev-parse", "HEAD"), git("merge-base", "HEAD", "origin/main")
    base = began if began and began != head else git("rev-parse", "HEAD^")
    before = base and git("show", f"{base}:{HERE}")
    if not before:
        pytest.skip("git has no earlier version of this file here, as in a clone of one commit")
    said = raised(BUDGET, budget_in(before), git("log", "--format=%B", f"{base}..HEAD") or "")
    assert not said, "\n".join(["say why in a line `Budget: REASON` of the commit's message:", *said])


@pytest.mark.parametrize(
    ("now", "messages", "said"),
    [
        (Size(10, 2), "", []),
        (Size(9, 1), "", []),
        (Size(11, 2), "a: more", ["a rose from Size(lines=10, files=2) to Size(lines=11, files=2)"]),
        (Size(9, 3), "Budget:\n", ["a rose from Size(lines=10, files=2) to Size(lines=9, files=3)"]),
        (Size(11, 2), "a: more\n\nBudget: it does more\n", []),
    ],
)
def test_the_rule_of_raised_numbers(now: Size, messages: str, said: list[str]) -> None:
    assert raised({"a": now}, budget_in('BUDGET = {"a": Size(10, 2)}'), messages) == said


def test_a_new_number_needs_a_reason() -> None:
    assert raised({"a": Size(1, 1)}, {}, "") == ["a rose from Size(lines=0, files=0) to Size(lines=1, files=1)"]


if __name__ == "__main__":
    for each, size in present().items():
        print(f'    "{each}": Size({size.lines}, {size.files}),')
