"""The registry's part for the start: hooks that run while a vLLM server starts."""

from __future__ import annotations

from tercet.vllm_plugin.expectations import Has, Says, Takes
from tercet.vllm_plugin.hooks import Hook
from tercet.vllm_plugin.start.loading_stages import OF_WORKERS

ENGINE_UTILS = "vllm.v1.engine.utils"
EXECUTOR = "vllm.v1.executor.multiproc_executor"
REGISTRY = "vllm.model_executor.models.registry"
WORKER = "vllm.v1.worker.worker_base:WorkerBase"
WORKER_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
CORE = "vllm.v1.engine.core:EngineCore"
STRUCTURED = "vllm.v1.structured_output:StructuredOutputManager"
ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"

START_HOOKS = (
    Hook(
        name="flags",
        what="vLLM's parsers raise an error for invalid flags",
        why="Their error message follows a list of all of vLLM's flags, of some 300 lines",
        until="vLLM's error message is one line",
        replaces=("FlexibleArgumentParser.error",),
        relies_on=(Takes("vllm.utils.argparse_utils:FlexibleArgumentParser.error", "message"),),
    ),
    Hook(
        name="loading stages",
        what="A worker's methods that load, profile and warm up log a line before they run",
        why="Users who wait for an engine see its stage, and which stage is slow",
        until="vLLM reports the progress of loading",
        overrides=tuple(f"WorkerBase.{method}" for method in OF_WORKERS),
        relies_on=(
            Says(f"{WORKER_WRAPPER}.init_worker", "resolve_obj_by_qualname(", "parallel_config.worker_cls"),
            Takes(f"{WORKER}.__init__", "vllm_config", "rank"),
            Says(f"{WORKER}.__init__", "self.model_config = vllm_config.model_config", "self.rank = rank"),
            Has(WORKER, "init_device", "load_model", "compile_or_warm_up_model"),
        ),
    ),
    Hook(
        name="one import",
        what="On a CPU, core and worker are forked in advance from the process that has imported vLLM, "
        "and models are inspected there; OpenMP's variables, which vLLM sets for its worker, are set from the start",
        why="Three imports of torch and vLLM, one after the other, take most of an engine's start",
        until="vLLM forks its processes from one that has imported it, on CPUs, too",
        replaces=("engine.utils.get_mp_context", "multiproc_executor.get_mp_context", "registry._run_in_subprocess"),
        relies_on=(
            Says(f"{ENGINE_UTILS}:CoreEngineProcManager.__init__", "context = get_mp_context()", "context.Process("),
            Says(f"{EXECUTOR}:WorkerProc.make_worker_process", "context = get_mp_context()", "context.Process("),
            Takes(f"{ENGINE_UTILS}:get_mp_context"),
            Takes(f"{EXECUTOR}:get_mp_context"),
            Takes(f"{REGISTRY}:_run_in_subprocess", "fn"),
            Says(
                "vllm.platforms.cpu:CpuPlatform.check_and_update_config", '"libgomp" in ld_preload_str', "libgomp*.so*"
            ),
            Says(
                "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs",
                'envs_dict["OMP_NUM_THREADS"] = str(len(cpu_list))',
                'envs_dict["GOMP_CPU_AFFINITY"] = cpu_list_str',
            ),
        ),
    ),
    Hook(
        name="first uses",
        what="An engine samples, ranks log probabilities and generates by a grammar before it serves; then its "
        "choice of a grammar's backend is taken back",
        why="The first use of each blocks the API server, core and workers for seconds, as if they were stuck",
        until="vLLM loads and compiles what sampling and structured output need when it starts",
        relies_on=(
            Says(f"{CORE}.__init__", "self.structured_output_manager = "),
            Says(f"{STRUCTURED}.__init__", "self.backend: StructuredOutputBackend | None = None"),
            Says(f"{STRUCTURED}.grammar_init", "if self.backend is None:"),
            Has("vllm.config:StructuredOutputsConfig", "backend"),
        ),
    ),
    Hook(
        name="start checks",
        what="Tercet checks its requirements where vLLM makes an engine's arguments from a server's flags, and where "
        "it makes a config from these",
        why="An engine that cannot serve the verbs reports this before it loads weights",
        until="vLLM calls its plugins before it starts an engine",
        replaces=("EngineArgs.from_cli_args", "EngineArgs.create_engine_config"),
        relies_on=(
            Takes(f"{ENGINE_ARGS}.from_cli_args", "args"),
            Takes(f"{ENGINE_ARGS}.create_engine_config", "usage_context"),
            Says("vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args", "load_general_plugins()"),
        ),
    ),
)
