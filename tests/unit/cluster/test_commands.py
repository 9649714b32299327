"""Pinning, the vLLM command, the YAML file and the flags: pure functions and their complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster import devices
from tercet.cluster.devices import as_cpu_list, cpu_flags, default_dtype, devices_for_engines, split_cores
from tercet.cluster.engine_command import EngineSpec, as_shell, engine_argv, engine_env, require_private
from tercet.cluster.local import engine_specs, starting_queues
from tercet.cluster.up_config import UpConfig
from tercet.cluster.vllm_flags import gpu_memory_of, is_group, rank_flags, ranks_of
from tercet.cluster.vllm_flags import value_of as flag_of
from tercet.protocol import BadRequest, TercetError
from tercet.settings import Source, decode_settings, read_yaml


def test_a_further_machine_of_an_engine_has_no_server() -> None:
    further = engine_argv(spec(cores=(0, 1), extra_args=("--nnodes", "2", "--node-rank", "1", "--headless")))
    first = engine_argv(spec(cores=(0, 1), extra_args=("--nnodes", "2", "--node-rank", "0")))
    assert further[2] == "tercet.vllm_plugin.start.node"
    assert first[2] == "vllm.entrypoints.openai.api_server"


@given(st.sets(st.integers(0, 63), min_size=1, max_size=40), st.integers(1, 20))
def test_every_engine_gets_cores_and_none_is_shared_needlessly(cores: set[int], engines: int) -> None:
    groups = split_cores(sorted(cores), engines)
    assert len(groups) == engines
    assert all(groups)
    if len(cores) >= engines:
        assert sorted(core for group in groups for core in group) == sorted(cores)
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
    else:
        assert {core for group in groups for core in group} == cores


@pytest.mark.parametrize(
    ("cores", "text"),
    [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2), "0,2"), ((5, 1, 2, 3), "1-3,5"), ((7, 8, 10), "7-8,10")],
)
def test_cpu_lists(cores: tuple[int, ...], text: str) -> None:
    assert as_cpu_list(cores) == text


def spec(**changes: object) -> EngineSpec:
    fields = {"name": "p", "model": "/models/m", "served_model_name": "m", "host": "h", "port": 1, "dtype": "float32"}
    return EngineSpec(**{**fields, **changes})  # type: ignore[arg-type]


def value_of(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1, argv
    return argv[argv.index(flag) + 1]


def test_the_command_loads_the_plugin() -> None:
    argv, env = engine_argv(spec(cores=(0, 1))), engine_env(spec(cores=(0, 1)))
    assert json.loads(value_of(argv, "--kv-transfer-config"))["kv_connector"] == "TercetConnector"
    assert (env["VLLM_PLUGINS"], env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == ("tercet", "0-1", "2")
    assert value_of(argv, "--max-num-batched-tokens") == "512"


@pytest.mark.parametrize(
    ("flags", "inherited", "disabled"),
    [((), {}, "1"), (("--no-enforce-eager",), {}, None), ((), {"TORCHDYNAMO_DISABLE": "0"}, None)],
)
def test_an_eager_engine_compiles_nothing(
    flags: tuple[str, ...], inherited: dict[str, str], disabled: str | None
) -> None:
    env = engine_env(spec(cores=(0,), extra_args=flags), inherited)
    assert env.get("TORCHDYNAMO_DISABLE") == disabled


def test_a_wrong_variable_is_refused_before_a_process_starts() -> None:
    with pytest.raises(BadRequest, match="TERCET_SPIN_SECONDS=soon"):
        engine_env(spec(cores=(0,)), {"TERCET_SPIN_SECONDS": "soon"})


@pytest.mark.parametrize(
    "given", [("--max-num-batched-tokens", "64"), ("--max-num-batched-tokens=64",), ("--max_num_batched_tokens", "64")]
)
def test_the_callers_flag_wins(given: tuple[str, ...]) -> None:
    argv = engine_argv(spec(cores=(0,), extra_args=given))
    assert tuple(argv[-len(given) :]) == given
    assert "512" not in argv
    assert "--enforce-eager" in argv


def test_a_simulated_engine_is_tercets_own_command_and_takes_no_cores() -> None:
    (simulated,) = engine_specs(
        UpConfig(simulate="llama-3.1-8b-h100-tp1", options={"max_num_seqs": "8"}, prefill=0), "/models/m"
    )
    argv = engine_argv(simulated)
    assert argv[1:4] == ["-m", "tercet.cli", "engine"]
    assert value_of(argv, "--simulate") == "llama-3.1-8b-h100-tp1"
    assert value_of(argv, "--option") == "max_num_seqs=8"
    assert value_of(argv, "--name") == "decode-0"
    assert simulated.cores == ()
    with pytest.raises(BadRequest, match="engine-args"):
        UpConfig(simulate="any", engine_args=("--max-num-seqs", "8"))
    with pytest.raises(BadRequest, match="options"):
        UpConfig(options={"max_num_seqs": "8"})


def test_engines_on_gpus_get_a_device_and_no_cpu_settings() -> None:
    env = engine_env(spec(gpus=("3",)))
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert not any(name.startswith(("VLLM_CPU", "OMP")) for name in env)
    assert "--enforce-eager" not in engine_argv(spec(gpus=("3",)))


@pytest.mark.parametrize(
    ("given", "service", "attributes"),
    [
        ({}, "tercet-engine", "service.instance.id=e%20%2C0"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine", "service.instance.id=e%20%2C0"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, "tercet-engine", "a=b,service.instance.id=e%20%2C0"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x,service.instance.id=y"}, None, None),
    ],
)
def test_vllms_own_spans_have_the_engines_name(
    given: dict[str, str], service: str | None, attributes: str | None
) -> None:
    env = engine_env(spec(name="e ,0"), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", **given})
    assert (env.get("OTEL_SERVICE_NAME"), env.get("OTEL_RESOURCE_ATTRIBUTES")) == (service, attributes)
    assert "OTEL_SERVICE_NAME" not in engine_env(spec(), given)


def test_pipeline_stages_on_cpu_warm_up() -> None:
    """With --enforce-eager vLLM's later stages have no room for what the one before them computes."""
    argv = engine_argv(spec(cores=(0, 1), extra_args=("--pipeline-parallel-size=2",)))
    assert "--enforce-eager" not in argv
    assert argv[argv.index("--compilation-config") + 1] == '{"mode":1,"backend":"eager"}'
    assert "--enforce-eager" in engine_argv(spec(cores=(0, 1), extra_args=("-pp", "1")))
    assert "--compilation-config" not in engine_argv(spec(gpus=("3",), extra_args=("-pp", "2")))


def test_the_callers_transfer_settings_are_joined_with_ours() -> None:
    given = ("--kv-transfer-config", '{"kv_connector_extra_config": {"lease_ttl": 5}}', "--seed", "1")
    argv = engine_argv(spec(extra_args=given))
    joined = json.loads(value_of(argv, "--kv-transfer-config"))
    assert (joined["kv_connector"], joined["kv_connector_extra_config"]) == ("TercetConnector", {"lease_ttl": 5})
    assert argv[-2:] == ["--seed", "1"]


@pytest.mark.parametrize("text", ["{", "[]", '{"kv_connector": "NixlConnector"}'])
def test_transfer_settings_that_do_not_go_with_ours_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--kv-transfer-config"):
        engine_argv(spec(extra_args=(f"--kv-transfer-config={text}",)))


def test_only_the_built_in_model_gets_a_short_context() -> None:
    assert value_of(engine_argv(spec(built_in=True)), "--max-model-len") == "2048"
    assert "--max-model-len" not in engine_argv(spec())
    given = ("--max-model-len", "512")
    assert value_of(engine_argv(spec(built_in=True, extra_args=given)), "--max-model-len") == "512"


@pytest.mark.parametrize(
    ("args", "bound", "threads"),
    [((), "0-3", "4"), (("-tp", "2"), "0-1|2-3", "2"), (("--tensor-parallel-size=2", "-pp", "2"), "0|1|2|3", "1")],
)
def test_every_rank_gets_cores(args: tuple[str, ...], bound: str, threads: str) -> None:
    env = engine_env(spec(cores=(0, 1, 2, 3), extra_args=args))
    assert (env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == (bound, threads)


@pytest.mark.parametrize("value", ["0", "x", "-1", ""])
def test_a_number_of_ranks_that_is_none(value: str) -> None:
    with pytest.raises(BadRequest, match="--tensor-parallel-size"):
        ranks_of(("--tensor-parallel-size", value))


@pytest.mark.parametrize(("cpu_build", "found"), [(True, []), (False, ["2", "3"])])
def test_engines_compute_on_devices_if_their_vllm_can(
    cpu_build: bool, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_cpu_build", lambda: cpu_build)
    assert [each.handle for each in devices_for_engines({"CUDA_VISIBLE_DEVICES": "2, 3"})] == found


def test_engines_that_share_a_device_get_a_share_of_its_memory() -> None:
    args = engine_argv(spec(gpus=("0",), gpu_memory=0.45))
    assert value_of(args, "--gpu-memory-utilization") == "0.45"
    given = ("--gpu-memory-utilization", "0.3")
    assert value_of(engine_argv(spec(gpus=("0",), gpu_memory=0.45, extra_args=given)), given[0]) == "0.3"
    assert gpu_memory_of(given) == 0.3
    with pytest.raises(BadRequest, match="must be greater than 0 and at most 1"):
        gpu_memory_of(("--gpu-memory-utilization", "45"))


def test_engines_that_share_a_device_start_one_after_the_other() -> None:
    specs = [spec(gpus=("0",)), spec(gpus=("1",)), spec(gpus=("0",)), spec(gpus=())]
    assert starting_queues(specs, "abcd") == [["a", "c"], ["b"], ["d"]]
    assert starting_queues([spec(cores=(0,)), spec(cores=(0,))], "ab") == [["a"], ["b"]]


def test_a_model_on_disk_needs_no_hub(tmp_path: Path) -> None:
    assert engine_env(spec(model=str(tmp_path)))["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_env(spec(model="org/model"))


def test_the_shell_command_is_quoted() -> None:
    assert as_shell(["/usr/bin/python3", "-m", "x", "--y", '{"a": 1}'], {"A": "b c"}) == (
        "A='b c' python -m x --y '{\"a\": 1}'"
    )


# ---- configuration -------------------------------------------------------------------------------------------


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("model: m\nprefill: 2\nlog-dir: /tmp/x\nprogram-args: {min_send: '5'}\nengine-args: [--a, b]\n")
    config = decode_settings(UpConfig, Source({"prefill": 3}), read_yaml(file))
    assert (config.model, config.prefill, config.log_dir, config.engine_args) == ("m", 3, "/tmp/x", ("--a", "b"))
    assert config.program_args == {"min_send": "5"}
    assert [name for name, _ in config.engine_roles] == ["prefill-0", "prefill-1", "prefill-2", "decode-0"]


def test_a_ratio_and_a_number_of_engines_are_counts_in_the_order_of_starts() -> None:
    config = UpConfig(max_instances=4, pd_ratio="1:3")
    assert config.engine_roles == [
        ("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode"), ("decode-2", "decode"),
    ]  # fmt: skip
    assert [name for name, _ in UpConfig(both=1, decode=0).engine_roles] == ["prefill-0", "engine-0"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil: 1", "prefil"),
        ("prefill: many", "prefill"),
        ("prefill: -1", "prefill"),
        ("port: 99999", "port"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "not YAML"),
        ("kv_cache_gib: 2", "did you mean kv-cache-gib"),
        ("nonsense: 2", "the keys are model"),
        ("prefill: [1]", "prefill: must be a whole number"),
        ("engine-args: [stray]", "engine-args: 'stray'"),
        ("engine-args: [--port, 1]", "engine-args: --port"),
        ("router-args: [--model=x]", "router-args: --model"),
        ("program-args: {x: {}}", "program-args"),
        ("prefill: 0\ndecode: 0", "start at least one engine"),
        ("max-instances: 1", "max-instances"),
        ("max-instances: 4\nboth: 1", "max-instances: cannot be combined with prefill"),
        ("pd-ratio: '2:1'", "pd-ratio: needs max-instances"),
        ("max-instances: 4\npd-ratio: '0:1'", "pd-ratio: '0:1' is not a ratio"),
        (b"\xff\xfe\x00", "not YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str | bytes, says: str) -> None:
    file = tmp_path / "up.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadRequest, match=says):
        decode_settings(UpConfig, read_yaml(file))


def test_numbers_and_truths_in_a_file_may_be_arguments(tmp_path: Path) -> None:
    file = tmp_path / "up.yaml"
    file.write_text("program-args: {min_send: 64, eager: true}\nengine-args: [--seed, 1]\n")
    config = decode_settings(UpConfig, read_yaml(file))
    assert config.program_args == {"min_send": "64", "eager": "true"}
    assert config.engine_args == ("--seed", "1")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="No such file"):
        decode_settings(UpConfig, read_yaml(tmp_path / "no.yaml"))


def test_errors_of_the_tree_have_a_sentence() -> None:
    assert issubclass(BadRequest, TercetError)
    assert UpConfig().public_name == "smollm2"


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "tcp://127.0.0.1:*"), ("0.0.0.0", "tcp://*:*"), ("localhost", "tcp://127.0.0.1:*")],
)
def test_kv_events_are_published_where_the_engine_listens(host: str, address: str) -> None:
    config = json.loads(value_of(engine_argv(spec(host=host)), "--kv-events-config"))
    assert config == {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": address}


def test_kv_events_are_left_to_callers_who_set_them_and_where_vllm_cannot_listen() -> None:
    own = '{"enable_kv_cache_events":false}'
    assert (
        value_of(engine_argv(spec(host="127.0.0.1", extra_args=("--kv-events-config", own))), "--kv-events-config")
        == own
    )
    for changes in ({"host": "::1"}, {"host": "gpu-7"}, {"host": "127.0.0.1", "extra_args": ("-dp", "2")}):
        assert "--kv-events-config" not in engine_argv(spec(**changes))


# ---- who may call it -------------------------------------------------------------------------------------------------


def spec_at(host: str, *args: str) -> EngineSpec:
    return EngineSpec(name="e", model="m", served_model_name="m", host=host, port=1, extra_args=args)


SECRET_CONFIG = '{"kv_connector_extra_config": {"secret": "s"}}'


@pytest.mark.parametrize(
    ("spec", "environment"),
    [
        (spec_at("127.0.0.1"), {}),
        (spec_at("0.0.0.0"), {"TERCET_SECRET": "s"}),
        (spec_at("0.0.0.0"), {"VLLM_API_KEY": "k"}),
        (spec_at("0.0.0.0", "--api-key", "k"), {}),
        (spec_at("0.0.0.0", "--uds", "/run/e"), {}),
        (spec_at("0.0.0.0", "--kv-transfer-config", SECRET_CONFIG), {}),
        (spec_at("127.0.0.1", "--api-server-count", "1"), {}),
    ],
    ids=str,
)
def test_an_engine_that_strangers_cannot_call_starts(spec: EngineSpec, environment: dict[str, str]) -> None:
    require_private(spec, environment)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (spec_at("0.0.0.0"), "set TERCET_SECRET to"),
        (spec_at("0.0.0.0", "--api-key", ""), "--api-key: the key is blank"),
        (spec_at("127.0.0.1", "--api-server-count=2"), "one API server keeps an engine's leases"),
    ],
    ids=str,
)
def test_one_that_they_could_call_is_refused_before_it_loads(spec: EngineSpec, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        require_private(spec, {})


# Fleets whose engines are the data-parallel ranks of one group.


@pytest.mark.parametrize("args", [(), ("--data-parallel-size", "1"), ("--max-num-seqs", "2")], ids=str)
def test_engines_by_themselves_are_told_nothing(args: tuple[str, ...]) -> None:
    assert not is_group(args)
    assert rank_flags(args, 3, "127.0.0.1") == [()] * 3


@pytest.mark.parametrize("args", [("--data-parallel-size", "3"), ("--data_parallel_size=3",), ("-dp", "3")], ids=str)
def test_each_engine_is_a_rank_and_they_meet_at_one_place(args: tuple[str, ...]) -> None:
    specs = engine_specs(UpConfig(prefill=1, decode=2, engine_args=(*args, "--enable-expert-parallel")), "m")
    commands = [engine_argv(spec) for spec in specs]
    assert [flag_of(argv[1:], "--data-parallel-rank") for argv in commands] == ["0", "1", "2"]
    assert {flag_of(argv[1:], "--data-parallel-address") for argv in commands} == {"127.0.0.1"}
    assert len({flag_of(argv[1:], "--data-parallel-rpc-port") for argv in commands}) == 1
    assert all("--enable-expert-parallel" in argv for argv in commands)
    assert len({spec.port for spec in specs}) == 3


@pytest.mark.parametrize("args", [("-dp", "2"), ("-dp", "4"), ("-dp", "x"), ("-dp", "3", "-dpn", "0")], ids=str)
def test_a_group_of_other_engines_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        engine_specs(UpConfig(prefill=1, decode=2, engine_args=args), "m")
    assert caught.value.param == "engine-args"


# What engines compute in where nobody says.


OLD = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\nbugs\t\t: x\n\nprocessor\t: 1\nflags\t\t: avx512f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        (OLD, "float32"),
        ("flags\t: avx2 avx512f", "bfloat16"),
        ("flags\t: avx2 avx512f avx512_bf16 amx_bf16", "bfloat16"),
        ("flags\t: avx2 avx_ne_convert", "bfloat16"),
        ("Features\t: asimd", "float32"),
        ("Features\t: asimd bf16", "bfloat16"),
        ("processor\t: 0\n", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_by_what_the_cpu_can_do(
    cpuinfo: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(devices, "CPUINFO", file)
    assert default_dtype(cpu=True) == wanted
    assert default_dtype(cpu=False) is None


def test_the_first_processor_speaks_for_all() -> None:
    assert cpu_flags(OLD) == {"fpu", "sse2", "avx", "avx2", "fma"}


@pytest.mark.parametrize(("said", "wanted"), [(None, "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")])
def test_who_says_one_gets_it(said: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(OLD)
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    spec = EngineSpec(name="p", model="m", served_model_name="m", host="h", port=1, dtype=said, cores=(0,))
    argv = engine_argv(spec)
    assert argv[argv.index("--dtype") + 1] == wanted
