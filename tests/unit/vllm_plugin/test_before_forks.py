"""What is computed before forks, and what an engine tries before it serves: each process has what it would compute
itself, and serves whatever comes of it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch._inductor
import vllm.env_override
from vllm.tokenizers.registry import cached_get_tokenizer
from vllm.utils.import_utils import resolve_obj_by_qualname

from tercet.cluster.model import resolve_model
from tercet.settings.process_settings import PARALLEL_TOKENIZERS
from tercet.vllm_plugin.core.core_methods import CoreCalls, forget_grammar_backend
from tercet.vllm_plugin.edge import attached_engine
from tercet.vllm_plugin.edge.attached_engine import practise_first_uses
from tercet.vllm_plugin.start import before_forks
from tercet.vllm_plugin.start import before_forks as module
from tercet.vllm_plugin.start.before_forks import (
    LOWERING,
    check_hooks,
    forget_changed_tokenizer,
    light_import,
    load_tokenizer,
)
from tercet.vllm_plugin.start.process_output import OF_WORKERS, log_stages_of_workers

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


# vLLM's import without PyTorch's compiler.


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


# What an engine's first worker logs while it loads, and that vLLM's own class stays as it is.

OWN = f"{__name__}.Worker"


class Worker:
    """A worker of a platform; it compiles nothing by itself."""

    def __init__(self, rank: int, enforce_eager: bool = False) -> None:
        self.rank, self.model_config = rank, SimpleNamespace(enforce_eager=enforce_eager)

    def init_device(self) -> str:
        return "device"

    def load_model(self, *, dummy: bool = False) -> bool:
        return dummy

    def compile_or_warm_up_model(self) -> float:
        return 0.5


def handed_to_vllm(name: str) -> Any:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=name))
    log_stages_of_workers(config)
    once = config.parallel_config.worker_cls
    log_stages_of_workers(config)
    assert config.parallel_config.worker_cls == once
    return resolve_obj_by_qualname(once)


@pytest.mark.parametrize(("eager", "last"), [(False, "compilation"), (True, "warm-up")])
def test_the_first_worker_logs_each_stage_as_it_begins(
    eager: bool, last: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, logger="tercet")
    worker, other = handed_to_vllm(OWN)(0, eager), handed_to_vllm(OWN)(1, eager)
    assert (worker.init_device(), worker.load_model(dummy=True), worker.compile_or_warm_up_model()) == (
        "device", True, 0.5,
    )  # fmt: skip
    assert other.init_device() == "device"
    assert caplog.messages == [f"stage: {stage}" for stage in ("device", "weights", last)]


def test_a_worker_gets_no_stage_that_it_does_not_have() -> None:
    ours = handed_to_vllm(OWN)
    assert ours is handed_to_vllm(OWN)
    assert issubclass(ours, Worker)
    assert {method for method in OF_WORKERS if hasattr(ours, method)} == set(OF_WORKERS) & set(vars(Worker))
    assert vars(ours).keys() & vars(Worker).keys() >= {"init_device", "load_model", "compile_or_warm_up_model"}


def test_workers_of_vllm_are_found_by_the_names_that_platforms_give() -> None:
    name = "vllm.v1.worker.cpu_worker.CPUWorker"
    vllms = resolve_obj_by_qualname(name)
    before = dict(vars(vllms))
    ours = handed_to_vllm(name)
    assert (ours.__bases__, ours.__name__) == ((vllms,), "CPUWorker")
    assert all(hasattr(ours, method) for method in OF_WORKERS)
    assert dict(vars(vllms)) == before


def test_a_name_that_is_none_of_these_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        resolve_obj_by_qualname("tercet.vllm_plugin.start.process_output.nothing")


class Core(CoreCalls):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def call(self, method: Any, *args: Any) -> Any:
        self.asked.append(method)


class Client:
    """As much of ``AsyncLLM`` as one request needs; ``fails`` is what its answer begins with."""

    def __init__(self, fails: str = "", has_tokenizer: bool = True) -> None:
        self._fails = fails
        self.params: list[Any] = []
        self.at_once: list[int] = []
        self._running = 0
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=not has_tokenizer))

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> AsyncGenerator[Any]:
        self.params.append(params)
        self._running += 1
        self.at_once.append(self._running)
        try:
            await asyncio.sleep(0)
            yield await self._answer()
        finally:
            self._running -= 1

    async def _answer(self) -> Any:
        if self._fails == "raises":
            raise ValueError("this model has no structured output")
        if self._fails == "hangs":
            await asyncio.Event().wait()
        choice = SimpleNamespace(token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None)
        return SimpleNamespace(outputs=[choice], num_cached_tokens=0, prompt_logprobs=None)


async def warmed_up(client: Any) -> Core:
    core = Core()
    await asyncio.wait_for(practise_first_uses(client, core, "token"), 60)
    return core


async def test_one_token_is_generated_by_a_grammar_and_the_choice_of_a_backend_is_taken_back() -> None:
    client = Client()
    core = await warmed_up(client)
    params = client.params[-1]
    assert (params.structured_outputs.regex, params.max_tokens) == ("a", 1)
    assert core.asked == [forget_grammar_backend]


@pytest.mark.parametrize(("fails", "why"), [("raises", "no structured output"), ("hangs", "no answer")])
async def test_an_engine_that_cannot_serves_all_else_and_says_so(
    fails: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached_engine, "FIRST_USE_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING):
        core = await warmed_up(Client(fails))
    assert core.asked == [forget_grammar_backend]
    assert why in caplog.text


async def test_sampling_is_tried_for_one_and_for_two_at_once_and_log_probabilities_with_it() -> None:
    client = Client()
    await warmed_up(client)
    wanted = [(each.temperature, each.logprobs) for each in client.params]
    assert wanted == [(1.0, 1), (1.0, None), (1.0, None), (0.0, None)]
    assert client.at_once == [1, 1, 2, 1]


async def test_without_a_tokenizer_no_grammar_is_tried() -> None:
    client = Client(has_tokenizer=False)
    assert (await warmed_up(client)).asked == []
    assert client.params
    assert all(each.structured_outputs is None for each in client.params)


@pytest.mark.parametrize(("configured", "left"), [("auto", None), ("xgrammar", "a backend")])
def test_a_backend_that_the_flags_name_stays(configured: str, left: str | None) -> None:
    config = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=configured))
    manager = SimpleNamespace(vllm_config=config, backend="a backend", backend_name="a backend")
    core: Any = SimpleNamespace(structured_output_manager=manager)
    forget_grammar_backend(core)
    assert (manager.backend, manager.backend_name) == (left, left)
