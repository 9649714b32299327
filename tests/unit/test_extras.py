"""A router and an engine run without packages and libraries of extras; a command that needs one names the extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

from tercet import __version__
from tercet.cli.commands import EXTRA_OF, MODULES
from tercet.protocol.entry_points import COMMANDS, EXTRAS, PARTS, SETTINGS, entry_points

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The packages of this repository, by the extra that installs each.
PACKAGES = {
    extra: tomllib.loads((ROOT / "packages" / f"tercet-{extra}" / "pyproject.toml").read_text())["project"]
    for extra in ("bench", "checks", "gateway", "lab", "planner", "ray")
}
BESIDE = [f"tercet_{extra}" for extra in PACKAGES]


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
OF_PACKAGES = {each.replace("_", "-") for each in BESIDE}
NOT_BROUGHT = sorted(
    module
    for module, packages in metadata.packages_distributions().items()
    if not {canonical(each) for each in packages} & (BROUGHT | OF_PACKAGES)
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
    "tercet.cli.up", "tercet.cli.engine", "tercet.cli.engine_process", "tercet.cli.detached",
    "tercet.cli.demo", "tercet.cli.chat", "tercet.cli.scale", "tercet.cli.trace",
    "tercet.cluster.local", "tercet.router.server", "tercet.router.workers",
    "tercet.decisions.scheduling",
)  # fmt: skip
OF_PACKAGES_RUN = (
    "tercet_lab.commands.sim", "tercet_bench.commands.bench", "tercet_checks.commands.chaos", "tercet_lab.small_openai",
    "tercet_lab.sim.sim_server", "tercet_gateway.commands.epp", "tercet_gateway.sidecar",
    "tercet_gateway.commands.upgrade", "tercet_ray.ray_fleet", "tercet_ray.ray_job", "tercet_ray.state_ray",
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
assert not {{each.partition(".")[0] for each in sys.modules}} & {set(BESIDE)}
for each in {OF_PACKAGES_RUN}: importlib.import_module(each)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch" in NOT_BROUGHT
    assert "httptools" not in NOT_BROUGHT


def imported(modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return run_without_extras(f"for each in {modules}: importlib.import_module(each)")


@pytest.mark.processes
def test_routers_and_commands_import_no_extra() -> None:
    done = imported((*WHAT_RUNS, *OF_PACKAGES_RUN))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.processes
def test_what_needs_an_extra_would_be_noticed() -> None:
    assert "grpc comes with an extra" in imported(("tercet_gateway.server",)).stderr


def test_the_plugin_names_no_extra() -> None:
    """vLLM brings SciPy and gRPC for uses of its own, so the engine's modules are read instead of imported."""
    modules = "|".join([*BESIDE, *(module for packages in EXTRAS.values() for module in packages)])
    statement = re.compile(rf"^\s*(?:import|from) (?:{modules})\b", re.MULTILINE)
    below = ("aio", "protocol", "settings", "wire", "transport", "decisions", "programs", "fleet")
    folders = (*below, "vllm_plugin", "router/openai")
    files = [path for each in folders for path in (ROOT / "src" / "tercet" / each).rglob("*.py")]
    assert len(files) > 140
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


WITHOUT_PACKAGES = f"""
import pathlib, sys
if HOW == "gone":
    real = pathlib.Path.glob
    pathlib.Path.glob = lambda self, *a: [e for e in real(self, *a) if not e.parent.name.startswith({tuple(BESIDE)})]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BESIDE}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["gone", "removed without its metadata"])
@pytest.mark.parametrize(
    ("line", "user", "extra"),
    [
        ("sim", "tercet sim", "lab"),
        ("bench serve --help", "tercet bench", "bench"),
        ("chaos --engines simulated", "tercet chaos", "checks"),
        ("conformance http://127.0.0.1:1", "tercet conformance", "checks"),
        ("planner", "tercet planner", "planner"),
        ("epp --engine http://127.0.0.1:1", "tercet epp", "gateway"),
        ("up --simulate llama-3.1-8b-h100-tp1", "--simulate", "lab"),
        ("engine --simulate llama-3.1-8b-h100-tp1", "--simulate", "lab"),
        ("up --on ray --host 10.0.0.9", "--on", "ray"),
        ("router --engine http://127.0.0.1:1 --openai-layer small", "--openai-layer", "lab"),
    ],
)
def test_a_command_whose_package_is_missing_says_so_in_one_line(line: str, user: str, extra: str, how: str) -> None:
    code = f"HOW = {how!r}\n{WITHOUT_PACKAGES}\nfrom tercet.cli import app; sys.exit(app._run({line.split()}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    expected = f"tercet: {user}: tercet-{extra} is not installed; install it with: pip install 'tercet[{extra}]'\n"
    said = re.sub(r"^importing .* \(\d+ s\)\n", "", done.stderr)  # progress, on a slow machine
    assert (done.returncode, said) == (2, expected)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["gone", "removed without its metadata"])
def test_a_simulation_with_a_planner_names_the_missing_package(how: str) -> None:
    words = [
        "sim",
        "--fleet",
        "1P1D",
        "--planner",
        "simulate",
        "--objective-ttft",
        "500",
        "--objective-tpot",
        "50",
        "--num-prompts",
        "20",
    ]
    without = WITHOUT_PACKAGES
    for each in (tuple(BESIDE), BESIDE):
        without = without.replace(str(each), str(type(each)(["tercet_planner"])))
    code = f"HOW = {how!r}\n{without}\nfrom tercet.cli import app; sys.exit(app._run({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    expected = "tercet: --planner: tercet-planner is not installed; install it with: pip install 'tercet[planner]'\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.processes
def test_help_lists_commands_whose_package_is_missing() -> None:
    code = f"HOW = 'gone'\n{WITHOUT_PACKAGES}\nfrom tercet.cli import app; sys.exit(app._run(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sim +Not installed: pip install 'tercet\[lab\]'", done.stdout)


def test_extras_have_the_packages_that_remedies_name() -> None:
    optional = PROJECT["optional-dependencies"]
    needed = {canonical(each) for each in PROJECT["dependencies"]}
    for extra, libraries in EXTRAS.items():
        requirements = PACKAGES[extra]["dependencies"] if extra in PACKAGES else optional[extra]
        names = {each for each in map(canonical, requirements) if not each.startswith("tercet")}
        assert names == set(libraries.values())
        assert not names & needed


def test_all_packages_have_one_version() -> None:
    assert {each["version"] for each in PACKAGES.values()} == {__version__}
    for extra, package in PACKAGES.items():
        assert package["name"] == f"tercet-{extra}"
        brings = ("bench", "checks", "lab", "planner") if extra == "lab" else (extra,)
        assert PROJECT["optional-dependencies"][extra] == [f"tercet-{each}=={__version__}" for each in brings]
        ours = [each for each in package["dependencies"] if each.startswith("tercet")]
        assert f"tercet=={__version__}" in ours
        assert all(each.endswith(f"=={__version__}") for each in ours)


def test_every_entry_point_is_there() -> None:
    for package in PACKAGES.values():
        for group in (COMMANDS, PARTS, SETTINGS):
            for name, place in package["entry-points"].get(group, {}).items():
                assert entry_points(group)[name] == place, "make setup"
                module, _, attribute = place.partition(":")
                found = import_module(module)
                assert not attribute or hasattr(found, attribute)
    assert {name for name, module in MODULES.items() if not module} == EXTRA_OF.keys() == entry_points(COMMANDS).keys()
