"""Imports point down only: the table of rooms and layers, and who may touch engines, tensors and sockets."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from tests.sources import PACKAGES
from tests.sources import PRODUCT as SOURCE

LAYERS = {
    0: {"protocol", "aio"},
    1: {"settings"},
    2: {"logs"},
    3: {"wire", "transport", "decisions"},
    4: {"engine", "programs", "fleet"},
    5: {"vllm_plugin", "store"},
    6: {"router", "cluster"},
    7: {"cli"},
}
# Beside the product; each may import the product and the packages named here, and no room of the product imports them.
BESIDE = {
    "tercet_gateway": set[str](),
    "tercet_ray": set[str](),
    "tercet_lab": {"tercet_gateway"},
    "tercet_bench": {"tercet_lab"},
    "tercet_planner": {"tercet_lab"},
    "tercet_checks": {"tercet_gateway", "tercet_lab"},
}
MOST_ROOMS, MOST_LAYERS = 15, 8
NO_ROOM = {"__version__"}  # what `from tercet import` names that is in the package's `__init__.py`
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
DECISIONS = {"programs", "decisions"}
# The verbs run on any engine, and have no way to a router of their own: an engine gives them one.
SEEN_BY_THE_VERBS = {"engine", "protocol", "settings", "logs", "aio", "transport"}
THE_PROTOCOL_IS_MADE_OF = sys.stdlib_module_names | {"msgspec"}
BARRED_FROM_DECISIONS = {"torch", "vllm", "socket", "aiohttp", "zmq"}
ENGINE_LIBRARIES = {"torch", "vllm"}
# Engines and routers on vLLM: the plugin, and vLLM's OpenAI layer over programs.
ON_VLLM = ("vllm_plugin", "router/openai")
# One converts a checkpoint in a process of its own, the other copies KV of accelerators.
OUTSIDE_OF_THE_PLUGIN = {"cluster/model.py", "transport/cuda_copies.py", "transport/torch_blocks.py"}


TEXT = re.compile(r'"""(?:[^\\"]|\\.|"(?!""))*"""', re.DOTALL)
IMPORT = re.compile(r"^[ \t]*(?:from [\w.]+ import (?:\([^)]*\)|.+)|import .+)$", re.MULTILINE)


class Import(NamedTuple):
    """One import statement: ``module`` as written, made absolute."""

    file: str
    line: int
    module: str

    @property
    def importer(self) -> str:
        """The room that the statement is in; a module beside the rooms stands for itself."""
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def library(self) -> str:
        return self.module.split(".")[0]

    @property
    def target(self) -> str | None:
        """The room that is imported, if it is one of ours."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "tercet" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"src/tercet/{self.file}:{self.line} imports {self.module}"


def imports_in(file: str, text: str) -> Iterator[Import]:
    """Every import of a file, those inside functions and under TYPE_CHECKING included."""
    package = ["tercet", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from tercet import router` names a room in the imported names.
            modules = [f"tercet.{alias.name}" for alias in node.names] if module == "tercet" else [module]
            yield from (Import(file, node.lineno, name) for name in modules)


def imports_alone(text: str) -> str:
    """The import statements of a formatted file, without the blocks that they stand in: a tenth to parse."""
    return "\n".join(match[0].strip() for match in IMPORT.finditer(TEXT.sub('""', text)))


@cache
def all_imports() -> list[Import]:
    return [
        found
        for path in sorted(SOURCE.rglob("*.py"))
        for found in imports_in(path.relative_to(SOURCE).as_posix(), imports_alone(path.read_text()))
    ]


def points_wrong(found: Import) -> str | None:
    """Why an import breaks the table, or None."""
    here, there = found.importer, found.target
    if there is None or here == there or there in NO_ROOM:
        return None
    if there not in LAYER_OF:
        return f"{found}: {there} is in no layer of the table"
    if here == "__init__":
        return None
    if here not in LAYER_OF:
        return f"{found}: {here} is in no layer of the table"
    if LAYER_OF[here] > LAYER_OF[there]:
        return None
    return f"{found}: layer {LAYER_OF[here]} ({here}) may not see layer {LAYER_OF[there]} ({there})"


def touches_engine(found: Import) -> bool:
    """Whether an engine library is imported where none belongs."""
    allowed = found.file.startswith(tuple(f"{room}/" for room in ON_VLLM)) or found.file in OUTSIDE_OF_THE_PLUGIN
    return found.library in ENGINE_LIBRARIES and not allowed


def report(broken: list[str]) -> str:
    return "\n  ".join(["imports that the layers do not allow:", *broken])


def test_every_package_is_in_the_table() -> None:
    modules = {path.stem for path in SOURCE.glob("[a-z]*.py")}
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | modules
    assert rooms <= set(LAYER_OF), f"give these a layer: {', '.join(sorted(rooms - set(LAYER_OF)))}"
    assert rooms == set(LAYER_OF), "the table has rooms that do not exist"
    assert len(rooms) <= MOST_ROOMS
    assert len(LAYERS) <= MOST_LAYERS


@pytest.mark.slow
def test_imports_point_down() -> None:
    broken = [why for found in all_imports() if (why := points_wrong(found))]
    assert not broken, report(broken)


def test_nothing_in_src_imports_a_package_beside_it() -> None:
    broken = [str(found) for found in all_imports() if found.library.startswith("tercet_")]
    assert not broken, report(broken)


def test_packages_import_only_the_packages_that_they_may_import() -> None:
    assert BESIDE.keys() == PACKAGES.keys()
    for package, folder in PACKAGES.items():
        texts = ((path, path.read_text()) for path in folder.rglob("*.py"))
        seen = {found.library for path, text in texts for found in imports_in(path.name, imports_alone(text))}
        assert {each for each in seen if each.startswith("tercet_")} <= {package, *BESIDE[package]}, package
        assert not seen & ENGINE_LIBRARIES, package


@pytest.mark.slow
def test_the_lowest_layer_needs_no_library() -> None:
    broken = [
        str(f)
        for f in all_imports()
        if f.target is None and LAYER_OF.get(f.importer) == 0 and f.library not in THE_PROTOCOL_IS_MADE_OF
    ]
    assert not broken, report(broken)


@pytest.mark.slow
def test_no_import_is_overlooked() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        found, expected = (
            sorted(each.module for each in imports_in("a/b.py", source)) for source in (imports_alone(text), text)
        )
        assert found == expected, path


def test_decisions_do_no_io_and_see_no_tensors() -> None:
    broken = [str(f) for f in all_imports() if f.importer in DECISIONS and f.library in BARRED_FROM_DECISIONS]
    assert not broken, report(broken)


def test_the_verbs_see_words_and_bytes_only() -> None:
    verbs = [found for found in all_imports() if found.importer == "engine"]
    broken = [str(each) for each in verbs if each.target in LAYER_OF and each.target not in SEEN_BY_THE_VERBS]
    assert verbs
    assert not broken, report(broken)
    assert not [str(each) for each in verbs if each.library in ENGINE_LIBRARIES]


def test_engine_libraries_stay_in_their_rooms() -> None:
    broken = [str(found) for found in all_imports() if touches_engine(found)]
    assert not broken, report(broken)


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("fleet/load.py", "from tercet.protocol import Request", False),
        ("fleet/load.py", "from tercet.decisions.scheduling.pick import pick", False),
        ("fleet/load.py", "from tercet.router import server", True),
        ("fleet/load.py", "from tercet import cli", True),
        ("fleet/load.py", "def f():\n    import tercet.cluster.local", True),
        ("fleet/load.py", "from ..wire import client", False),
        ("programs/patterns.py", "from tercet.fleet import EngineFleet", True),
        ("decisions/cost/fit.py", "from tercet.decisions.scheduling import Engines", False),
        ("protocol/types.py", "from ..wire import client", True),
        ("vllm_plugin/worker/side.py", "from tercet.transport import Receiver", False),
        ("wire/client/http.py", "from tercet.transport import Receiver", True),
        ("transport/tcp.py", "from tercet.vllm_plugin import config", True),
        ("engine/edge.py", "from tercet.transport import Push", False),
        ("engine/edge.py", "from tercet.vllm_plugin.core import core_methods", True),
        ("vllm_plugin/endpoint.py", "from tercet.engine.edge import Edge", False),
        ("router/server.py", "from tercet.cluster import model", True),
        ("cluster/local.py", "from tercet.router import server", True),
        ("cli/main.py", "from tercet.router import server", False),
        ("cli.py", "from tercet.router import server", False),
        ("attic/old.py", "from tercet.protocol import Request", True),
        ("cli/main.py", "import tercet.lab", True),
        ("cli/main.py", "from tercet.lab import simulate", True),
        ("cli/main.py", "from tercet import lab", True),
        ("__init__.py", "from tercet.lab import simulate", True),
        ("router/server.py", "from tercet.attic import old", True),
        ("router/server.py", "from tercet import __version__", False),
    ],
)
def test_the_rule_itself(file: str, text: str, wrong: bool) -> None:
    (found,) = imports_in(file, text)
    assert bool(points_wrong(found)) is wrong


def test_files_on_vllm_import_it_or_their_package_says_why_not() -> None:
    libraries = ENGINE_LIBRARIES | {"transformers"}
    those_that_do = {found.file for found in all_imports() if found.library in libraries}
    inside = ("vllm_plugin/*/*.py", "router/openai/*.py", "router/openai/*/*.py")
    for path in sorted(path for pattern in inside for path in SOURCE.glob(pattern)):
        if path.stem != "__init__" and path.relative_to(SOURCE).as_posix() not in those_that_do:
            why = ast.get_docstring(ast.parse((path.parent / "__init__.py").read_text())) or ""
            assert f"``{path.stem}``" in why.partition("Without an import of vLLM")[2], f"{path}: say why it is here"


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("cluster/model.py", "import torch", False),
        ("cluster/local.py", "import torch", True),
        ("transport/torch_blocks.py", "import torch", False),
        ("transport/staged.py", "import torch", True),
        ("engine/edge.py", "from vllm.v1 import engine", True),
        ("vllm_plugin/connector.py", "from vllm.v1 import engine", False),
        ("router/openai/program_client.py", "from vllm.v1 import engine", False),
        ("router/openai_server.py", "from vllm.v1 import engine", True),
        ("router/server.py", "from vllm.v1 import engine", True),
    ],
)
def test_the_engine_rule_itself(file: str, text: str, wrong: bool) -> None:
    (found,) = imports_in(file, text)
    assert touches_engine(found) is wrong
