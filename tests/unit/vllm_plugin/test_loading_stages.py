"""What an engine's first worker logs while it loads, and that vLLM's own class stays as it is."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from tercet.vllm_plugin.start.process_output import OF_WORKERS, log_stages_of_workers

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
