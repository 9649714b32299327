"""What is computed before forks is what each process would compute itself, and never of files that have changed."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.tokenizers.registry import cached_get_tokenizer

from tercet.cluster.model import resolve_model
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.start import before_forks
from tercet.vllm_plugin.start.before_forks import check_hooks, forget_changed_tokenizer, load_tokenizer

hf: Any = importlib.import_module("vllm.renderers.hf")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    """A copy of the built-in checkpoint without its weights; the caches are empty before and after."""
    before_forks._forget_tokenizers()
    built_in = Path(resolve_model("smollm2"))
    for file in built_in.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path / file.name)
    yield tmp_path
    before_forks._forget_tokenizers()


def test_vllm_finds_the_tokenizer_in_its_cache_and_no_thread_was_started(checkpoint: Path) -> None:
    threads, variable = len(os.listdir("/proc/self/task")), os.environ.get(PARALLEL_TOKENIZERS)
    load_tokenizer(checkpoint)
    assert len(os.listdir("/proc/self/task")) == threads
    assert os.environ.get(PARALLEL_TOKENIZERS) == variable
    # The call that vLLM makes for a model without flags about its tokenizer.
    tokenizer = cached_get_tokenizer(
        str(checkpoint), runner_type="generate", tokenizer_mode="auto", revision=None, trust_remote_code=False
    )
    assert cached_get_tokenizer.cache_info()[:2] == (1, 1)
    assert tokenizer.decode(tokenizer.encode("Say hello.")) == "Say hello."


def test_files_that_have_not_changed_are_not_read_again(checkpoint: Path) -> None:
    load_tokenizer(checkpoint)
    forget_changed_tokenizer()
    assert cached_get_tokenizer.cache_info().currsize == 1
    assert hf._PROCESSOR_CHAT_TEMPLATES


@pytest.mark.parametrize("change", ["written again", "removed"])
def test_a_tokenizer_is_loaded_again_when_its_files_have_changed(change: str, checkpoint: Path) -> None:
    load_tokenizer(checkpoint)
    file = checkpoint / "tokenizer_config.json"
    content = file.read_bytes()
    file.unlink()
    if change == "written again":
        file.write_bytes(content + b"\n")
    forget_changed_tokenizer()
    assert cached_get_tokenizer.cache_info().currsize == 0
    assert not hf._PROCESSOR_CHAT_TEMPLATES


@pytest.mark.parametrize("present", [True, False])
def test_a_directory_without_a_tokenizer_is_left_to_the_engine(present: bool, tmp_path: Path) -> None:
    load_tokenizer(tmp_path if present else tmp_path / "missing")
    forget_changed_tokenizer()
    assert not before_forks._loaded


def test_a_vllm_that_does_not_match_is_left_to_who_requires_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(side: str) -> None:
        asked.append(side)
        raise before_forks.UnsupportedVLLM("no")

    monkeypatch.setattr(before_forks, "require_hooks", refuse)
    check_hooks("engine", "frontend")
    assert asked == ["engine", "frontend"]
