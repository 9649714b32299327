"""What pages say of the code as a whole: public names, the README's numbers, examples of how code is cut."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tercet.vllm_plugin.hooks import SIDES, hooks_of
from tests.sources import modules

from .pages import DOCS, ROOT

PUBLIC = sorted(
    set(re.findall(r"`(tercet\.(?:protocol|programs|migration)\.\w+)`", (DOCS / "stability.md").read_text()))
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_exported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert attribute in importlib.import_module(module).__all__


def test_the_list_is_not_empty() -> None:
    assert len(PUBLIC) > 10


def test_the_licence_is_the_one_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_the_readme_counts_what_is_changed_by_kind() -> None:
    hooks = [hook for side in SIDES for hook in hooks_of(side)]
    kinds = [[hook.replaces for hook in hooks], [hook.overrides for hook in hooks], [hook.copies for hook in hooks]]
    replaced, overridden, copied = (len({name for names in kind for name in names}) for kind in kinds)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"replaces {replaced} attributes of vLLM in place" in readme
    assert f"overrides {overridden} in subclasses" in readme
    assert f"sets {copied} on copies" in readme
    assert replaced <= 45


def test_the_readme_says_how_long_the_data_plane_is() -> None:
    """The README's own command, within a hundredth."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    (said,) = re.findall(r"five transports are ([\d,]+) lines", readme)
    (command,) = re.findall(r"`(git ls-files [^`]+\| wc -l)`", readme)
    counted = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = int(counted.stdout)
    assert abs(int(said.replace(",", "")) - lines) <= lines / 100, f"it prints {lines}"


def test_the_readme_says_how_long_the_compared_connector_is() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    if "'0.32." not in (package / "_version.py").read_text():
        pytest.skip("the README speaks of vLLM 0.32")
    connector = package / "distributed/kv_transfer/kv_connector/v1/nixl"
    lines = sum(len(path.read_text().splitlines()) for path in connector.glob("*.py"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    (said,) = re.findall(r"connector for NIXL alone, .*? has ([\d,]+)\.", readme)
    assert abs(int(said.replace(",", "")) - lines) <= lines / 100, f"it has {lines}"


def test_the_examples_of_how_code_is_cut_end_as_the_code_is_today() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    after = [line[1:].strip() for line in page.splitlines() if line.startswith("+ ")]
    source = "\n".join(path.read_text() for _, path in modules())
    assert len(after) > 5
    assert [line for line in after if line not in source] == []
