"""vLLM's import without PyTorch's compiler."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch._inductor
import vllm.env_override

from tercet.vllm_plugin.start import before_forks as module
from tercet.vllm_plugin.start.before_forks import LOWERING, light_import


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before vLLM's import: Inductor's module is not there."""
    monkeypatch.delitem(sys.modules, LOWERING, raising=False)
    monkeypatch.delattr(torch._inductor, "lowering", raising=False)


@pytest.mark.usefixtures("unloaded")
def test_vllms_list_of_operators_does_not_import_the_compiler() -> None:
    patching: Any = vllm.env_override
    with light_import(compiles=False):
        patching._patch_inductor_fallback_allow_list()
        placeholder = sys.modules[LOWERING]
        assert isinstance(vars(placeholder)["FALLBACK_ALLOW_LIST"], SimpleNamespace)
        assert not hasattr(placeholder, "__file__"), "the real module has a file"
    assert LOWERING not in sys.modules, "who needs it imports the real one"


@pytest.mark.usefixtures("unloaded")
def test_a_process_that_compiles_imports_it_as_vllm_does() -> None:
    with light_import(compiles=True):
        assert LOWERING not in sys.modules


def test_a_module_that_is_already_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    there = SimpleNamespace()
    monkeypatch.setitem(sys.modules, LOWERING, there)  # pyright: ignore[reportArgumentType]
    with light_import(compiles=False):
        assert sys.modules[LOWERING] is there
    assert sys.modules[LOWERING] is there
    assert module.RESAMPLING in sys.modules
