"""What the page of stability calls public can be imported, and is exported where it says."""

from __future__ import annotations

import importlib
import re
import tomllib

import pytest

from tercet.vllm_plugin.hooks import SIDES, hooks_of

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
    """The README's own command, within a tenth."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    (said,) = re.findall(r"five transports are ([\d,]+) lines", readme)
    (named,) = re.findall(r"git ls-files ([^)]+)\)", readme)
    folders = named.replace("{core,edge,worker}", "core").split() + [
        f"src/tercet/vllm_plugin/{room}" for room in ("edge", "worker")
    ]
    lines = sum(len(path.read_text().splitlines()) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert abs(int(said.replace(",", "")) - lines) < lines / 10
