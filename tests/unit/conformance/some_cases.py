"""A plugin for the suite, with ``-p``: run what must fail, and a share of all else that is always the same.

It is linked to where the suite is installed, so it imports nothing of this repository.
"""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("some of the cases")
    group.addoption("--all-of", metavar="NAME,...", help="functions of which all cases run")
    group.addoption("--one-in", type=int, default=10, metavar="N", help="of the other cases one in so many runs (10)")
    group.addoption("--seed", default="", metavar="TEXT", help="another text selects other cases")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole, share = str(config.getoption("--all-of")).split(","), int(config.getoption("--one-in") or 10)
    seed = str(config.getoption("--seed"))
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        # Python's own hash of a text differs from process to process.
        drawn = zlib.crc32(f"{seed} {item.nodeid}".encode()) % share == 0
        (kept if drawn or item.name.partition("[")[0] in whole else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
