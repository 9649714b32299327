"""Modules that are imported when they are used."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet.aio.importing import frames_without_source, import_late, without_collections


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "late_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "costly.py").write_text("loaded = True\ndef double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "late_package.costly"
    for name in [name for name in sys.modules if name.startswith("late_package")]:
        del sys.modules[name]


def is_loaded(name: str) -> bool:
    return "loaded" in vars(sys.modules[name])


def test_it_is_imported_when_it_is_used(package: str) -> None:
    import_late(package)
    module = importlib.import_module(package)
    assert not hasattr(module, "__path__")
    assert not is_loaded(package)
    assert module.double(2) == 4
    assert is_loaded(package)
    assert sys.modules[package] is not module
    assert module.double is sys.modules[package].double  # and what stood for it has its attributes


def test_a_name_imported_from_it_is_the_modules_own(package: str) -> None:
    import_late(package)
    scope: dict[str, object] = {}
    exec(f"from {package} import double", scope)
    assert scope["double"] is sys.modules[package].double


def test_what_is_missing_is_an_error_of_the_one_who_uses_it() -> None:
    import_late("late_package_that_is_missing")
    module = importlib.import_module("late_package_that_is_missing")
    with pytest.raises(ModuleNotFoundError, match="late_package_that_is_missing"):
        getattr(module, "anything")  # noqa: B009 - pyright sees no use in the attribute alone
    assert "late_package_that_is_missing" not in sys.modules


def test_one_that_is_imported_stays(package: str) -> None:
    module = importlib.import_module(package)
    import_late(package)
    assert sys.modules[package] is module


@pytest.mark.parametrize("enabled", [True, False])
def test_what_an_import_makes_is_never_searched_for_garbage(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        before = gc.get_freeze_count()
        with without_collections():
            assert not gc.isenabled()
            made = [[number] for number in range(10_000)]
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()


def test_a_place_is_found_without_a_search_for_its_source() -> None:
    frame = sys._getframe()
    slow = inspect.getframeinfo
    with frames_without_source():
        quick, expected = inspect.getframeinfo(frame), slow(frame)
    assert (quick.filename, quick.function) == (expected.filename, expected.function)
    assert quick.lineno == expected.lineno
    assert inspect.getframeinfo is slow
