"""What could be published: each package's sdist makes its wheel, and the wheels serve from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripts.wheels import copy_of

from tests.simulated_processes import ask

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "tercet": ROOT,
    **{
        f"tercet_{name}": ROOT / "packages" / f"tercet-{name}"
        for name in ("bench", "checks", "gateway", "lab", "planner", "ray")
    },
}
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def built(source: Path, kind: str, into: Path) -> Path:
    """What setuptools builds of a folder, without a network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(into)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheels and this environment's other packages, but not this checkout."""
    folder = tmp_path_factory.mktemp("artefacts")
    environment = folder / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    for name, source in PACKAGES.items():
        sdist = built(copy_of(source, folder / name), "sdist", folder)
        with tarfile.open(sdist) as packed:
            packed.extractall(folder / "unpacked", filter="data")
        (unpacked,) = [each for each in (folder / "unpacked").iterdir() if each.name.startswith(f"{name}-")]
        wheel = built(unpacked, "wheel", folder)
        with zipfile.ZipFile(wheel) as packed_wheel:
            packed_wheel.extractall(site)
    # A path in a .pth file brings packages, and not the .pth files next to them, such as that of this checkout.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin" / "python"


def tercet(python: Path, folder: Path, words: Sequence[str]) -> str:
    """What a command prints in an empty folder; it must succeed."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TERCET_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [str(python), "-m", "tercet.cli", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheels_are_what_is_imported(python: Path, tmp_path: Path) -> None:
    names = "tercet, tercet_lab, tercet.lab, tercet_gateway, tercet_ray, tercet_planner, tercet_checks, tercet_bench"
    code = f"import json, {names}; print(json.dumps([each.__file__ for each in ({names})]))"
    found = subprocess.run([str(python), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert all(str(python.parents[1]) in path for path in json.loads(found.stdout))


def test_the_wheels_simulate_and_serve_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    assert "TTFT" in tercet(python, tmp_path / "sim", ["sim", "--num-prompts", "20"])
    assert "llama-3.1-8b-h100-tp1" in tercet(python, tmp_path / "bench", ["bench", "profile"])
    assert "no violations" in tercet(python, tmp_path / "chaos", ["chaos", "--fleet", "2,2", "--minutes", "0.1"])
    words = ["up", "--simulate", "llama-3.1-8b-h100-tp1", "--prefill", "1", "--decode", "1", "--port", "0", "--detach"]
    said = tercet(python, tmp_path / "up", words)
    url = next(line for line in said.splitlines() if line.startswith("ready at ")).split()[2].rstrip(",")
    try:
        answer = ask(f"{url}/v1/completions", {"model": "smollm2", "prompt": "A tercet is", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        tercet(python, tmp_path / "up", ["down", "--port", url.rpartition(":")[2]])
