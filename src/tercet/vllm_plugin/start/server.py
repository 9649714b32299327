"""vLLM's OpenAI server on CPU cores; its processes share one import.

The command is ``python -m tercet.vllm_plugin.start.server FLAGS``.

The flags and the server are vLLM's. Unlike the plain command, this one imports torch and vLLM once instead of three
times (:mod:`.standby`). Variables that vLLM sets for a worker before it spawns it must be set before this process
begins, since libraries read them once: PyTorch's OpenMP, and the cores to which its threads are bound.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tercet.settings.process_settings import NO_DYNAMO, PRELOAD, THREADS_BIND
from tercet.vllm_plugin.start.before_forks import check_hooks, light_import
from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence, refusing_in_a_sentence, without_noise
from tercet.vllm_plugin.start.standby import StandbyContext, stand_by

PLAIN = "vllm.entrypoints.openai.api_server"
AFFINITY = "GOMP_CPU_AFFINITY"
# The cores that this process may use in addition to those to which the worker's threads are bound.
ALLOWED = "TERCET_ALLOWED_CORES"
# Modules that the API server, the core and the worker import before they serve, if this version of vLLM has them.
OF_ENGINE = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.render.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.structured_output.backend_lm_format_enforcer",
    "vllm.v1.structured_output.backend_outlines",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.renderers.hf",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.generate.generative_scoring.serving",
    "vllm.entrypoints.generate.structured_decisions.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.entrypoints.openai.models.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.derender.api_router",
    "vllm.entrypoints.scale_out.render.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.elastic_ep.api_router",
    "vllm.entrypoints.serve.instrumentator",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.entrypoints.serve.profile.api_router",
    "vllm.entrypoints.serve.tokenize.api_router",
    "model_hosting_container_standards.sagemaker",
    "xgrammar.kernels.apply_token_bitmask_inplace_cpu",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "tercet.vllm_plugin.endpoint",  # with the connector, the core's methods and the worker's
    "tercet.vllm_plugin.register",
)


def main() -> None:
    """Run as the server of an engine; the process is executed again first if libraries need other variables."""
    wanted = read_once(os.environ, openmp())
    if wanted.items() <= os.environ.items():
        without_noise()
        groups = core_groups(os.environ[THREADS_BIND])
        if AFFINITY in os.environ:
            # When OpenMP was loaded, it bound this process to the cores of the worker.
            groups = [frozenset(os.sched_getaffinity(0))]
            os.sched_setaffinity(0, [int(core) for core in os.environ[ALLOWED].split(",")])
            del os.environ[AFFINITY]  # vLLM sets it for its worker only
        import_engine()
        _serve(groups)
    else:
        wanted[ALLOWED] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def serve_imported() -> None:
    """Run as the server in a process that has already imported vLLM, without being bound to cores.

    Each worker is restricted to its cores, and so are the threads of OpenMP that it starts: they share these cores,
    while the threads of :func:`main`'s only worker are bound to one core each.
    """
    without_noise()
    _serve(core_groups(os.environ[THREADS_BIND]))


def import_engine() -> None:
    """Import the modules in :data:`OF_ENGINE`."""
    with light_import(compiles=os.environ.get(NO_DYNAMO) != "1"):
        for module in OF_ENGINE:
            with suppress(ModuleNotFoundError):
                importlib.import_module(module)


def core_groups(bind: str) -> list[frozenset[int]]:
    """Return the cores of each worker in a list such as ``0-3,8|4-7``."""
    return [frozenset(core for part in group.split(",") for core in _span(part)) for group in bind.split("|")]


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def _serve(workers: Sequence[frozenset[int]]) -> None:
    """Fork the core and the workers, which wait until vLLM starts them; then run as the API server."""
    # vLLM starts its core and its workers by this context.
    # Replaced in the modules that have imported the function: vLLM looks it up there.
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        module: Any = importlib.import_module(name)
        module.get_mp_context = StandbyContext
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = _run_here
    check_hooks("engine")
    stand_by(workers)
    refuse_in_a_sentence()
    with refusing_in_a_sentence():
        runpy.run_module(PLAIN, run_name="__main__", alter_sys=True)


def _run_here(fn: Callable[[], Any]) -> Any:
    """Inspect a model's class. vLLM does it in another process so that GPUs stay uninitialised; there are none here.

    The worker, a fork of this process, checks the hooks once more, so the parameter has vLLM's name.
    """
    return fn()


def read_once(environment: Mapping[str, str], openmp: Path | None) -> dict[str, str]:
    """Return the variables that vLLM would set for its worker in this ``environment`` and that ``openmp`` reads."""
    preload = with_openmp(environment.get(PRELOAD, ""), openmp)
    bind = environment[THREADS_BIND]
    # If several workers share one import, OpenMP is loaded once, and cannot be bound to the cores of one worker.
    return {PRELOAD: preload} | ({} if "|" in bind else {AFFINITY: bind.replace(",", " ")})


def with_openmp(preload: str, openmp: Path | None) -> str:
    """Return the libraries of ``preload``, followed by ``openmp``."""
    if openmp is None or str(openmp) in preload:
        return preload
    return ":".join(filter(None, (preload, str(openmp))))


def openmp() -> Path | None:
    """Return PyTorch's own OpenMP, which vLLM loads before all other libraries. None if PyTorch has none."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    package = Path(torch.origin).parent
    places = (package.with_name("torch.libs"), package / "lib")
    return next((found for place in places for found in sorted(place.glob("libgomp*.so*"))), None)


if __name__ == "__main__":
    main()
