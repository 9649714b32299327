"""A router and an engine run without the packages of extras; a command that needs them names the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tercet.settings.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(requirement: str) -> str:
    """The name of the package that is required, as the index writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def closure(requirements: list[str]) -> set[str]:
    """These packages and all that they require, without extras."""
    found: set[str] = set()
    left = [canonical(each) for each in requirements]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        left += [canonical(each) for each in wanted if "extra ==" not in each]
    return found


BROUGHT = closure(PROJECT["dependencies"]) | {"tercet"}
NOT_BROUGHT = sorted(
    module
    for module, packages in metadata.packages_distributions().items()
    if not {canonical(each) for each in packages} & BROUGHT
)
# What comes with an extra cannot be imported, as if it were not installed.
WITHOUT_EXTRAS = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(each for modules in EXTRAS.values() for each in modules)}:
            raise ModuleNotFoundError(f"{{name}} comes with an extra", name=name)
sys.meta_path.insert(0, Refuse())
"""
WHAT_RUNS = (
    "tercet.cli.up", "tercet.cli.engine", "tercet.cli.servers", "tercet.cli.detached", "tercet.cli.demo",
    "tercet.cli.chat", "tercet.cli.status", "tercet_lab.commands.sim", "tercet_lab.commands.bench", "tercet_lab.commands.chaos", "tercet_gateway.commands.epp",
    "tercet.cluster.local", "tercet.router.server", "tercet_lab.small_server", "tercet.router.workers",
    "tercet.router.serve.rescheduler_server", "tercet_gateway.sidecar.server", "tercet_lab.sim.sim_server",
)  # fmt: skip
OF_ENGINES = (
    "tercet.vllm_plugin.register", "tercet.vllm_plugin.connector", "tercet.vllm_plugin.endpoint",
    "tercet.transport.agent.agent",
)  # fmt: skip


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.processes
def test_what_runs_imports_only_what_the_package_brings() -> None:
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_BROUGHT}:
            raise ModuleNotFoundError(f"{{name}} is in no dependency of tercet", name=name)
sys.meta_path.insert(0, Refuse())
for each in {WHAT_RUNS}: importlib.import_module(each)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch" in NOT_BROUGHT
    assert "httptools" not in NOT_BROUGHT


def imported(modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return run_without_extras(f"for each in {modules}: importlib.import_module(each)")


@pytest.mark.processes
def test_routers_and_commands_import_no_extra() -> None:
    done = imported(WHAT_RUNS)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.processes
def test_what_needs_an_extra_would_be_noticed() -> None:
    assert "grpc comes with an extra" in imported(("tercet_gateway.server",)).stderr


def test_the_plugin_names_no_extra() -> None:
    """vLLM brings SciPy and gRPC for uses of its own, so the engine's modules are read instead of imported."""
    modules = "|".join(module for packages in EXTRAS.values() for module in packages)
    statement = re.compile(rf"^\s*(?:import|from) (?:{modules})\b", re.MULTILINE)
    folders = ("aio", "protocol", "settings", "wire", "transport", "decisions", "programs", "fleet", "vllm_plugin")
    files = [path for each in folders for path in (ROOT / "src" / "tercet" / each).rglob("*.py")]
    assert len(files) > 200
    # The adapter is imported where variables ask for spans, and nowhere else: see wire/test_exported_spans.py.
    adapter = ROOT / "src" / "tercet" / "wire" / "otel.py"
    assert [path for path in files if statement.search(path.read_text())] == [adapter]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("epp --engine http://127.0.0.1:1", "gateway"),
        ("bench report x.json --figure x.png", "lab"),
        ("sim --over fleet=1P1D --plot x.png", "lab"),
        ("bench profile --engine http://127.0.0.1:1 --output x.json", "lab"),
    ],
)
def test_a_command_whose_extra_is_missing_says_so_in_one_line(line: str, extra: str) -> None:
    done = run_without_extras(f"from tercet.cli import app; sys.exit(app._run({line.split()}))")
    assert done.returncode == 2
    assert re.fullmatch(
        rf"tercet: .*: \S+ is not installed; install it with: pip install 'tercet\[{extra}\]'\n", done.stderr
    ), done.stderr


def test_extras_have_the_packages_that_remedies_name() -> None:
    optional = PROJECT["optional-dependencies"]
    needed = {re.split(r"[>=<\[]", each)[0] for each in PROJECT["dependencies"]}
    for extra, packages in EXTRAS.items():
        names = {re.split(r"[>=<\[]", each)[0] for each in optional[extra]}
        assert names == set(packages.values())
        assert not names & needed
