"""What `tercet engine` and `tercet up` start on machines with GPUs: here an `nvidia-smi` that lists some."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tercet.cli import app
from tercet.cluster import devices
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet.cluster.local import engine_specs, starting_queues
from tercet.cluster.up_config import UpConfig
from tercet.cluster.vllm_flags import GPU_MEMORY, KV_TRANSFER, value_of
from tercet.protocol import BadRequest

MIB_80 = 81920
HasGPUs = Callable[..., None]


@pytest.fixture
def has_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HasGPUs:
    """A machine with vLLM's CUDA build and a GPU of 80 GiB for each number, of which so many MiB are free."""
    monkeypatch.setattr(devices, "is_cpu_build", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(*free: int) -> None:
        listed = [
            f"{index}, GPU-{index}, H100, {MIB_80}, {mib}, 580.65, Default, Disabled" for index, mib in enumerate(free)
        ]
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(listed) + "\nEND\n")
        tool.chmod(0o755)

    return write


def given(specs: Sequence[EngineSpec]) -> list[tuple[str | None, str | None]]:
    """Each engine's devices, and the share of their memory."""
    return [(engine_env(each).get("CUDA_VISIBLE_DEVICES"), value_of(engine_argv(each), GPU_MEMORY)) for each in specs]


def test_a_first_time_user_with_one_gpu_gets_two_engines_on_it(has_gpus: HasGPUs) -> None:
    has_gpus(MIB_80)
    specs = engine_specs(UpConfig(), "m")
    assert given(specs) == [("0", "0.453"), ("0", "0.453")]
    assert len(starting_queues(specs, specs)) == 1  # one after the other
    for spec in specs:
        argv = engine_argv(spec)
        assert value_of(argv, "--dtype") is None  # vLLM knows what the device computes in
        assert engine_env(spec, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as nvidia-smi counts
        assert engine_env(spec, {})["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert "VLLM_WORKER_MULTIPROC_METHOD" not in engine_env(spec, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"})
        assert "CUDA_DEVICE_ORDER" not in engine_env(spec, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
        assert "--enforce-eager" not in argv
        assert not {"VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"} & {*engine_env(spec)}
        assert "TercetConnector" in (value_of(argv, KV_TRANSFER) or "")
        assert "transport" not in (value_of(argv, KV_TRANSFER) or "")  # auto: engines of one device map its memory


def test_with_two_each_has_its_own_and_both_start_at_once(has_gpus: HasGPUs) -> None:
    has_gpus(MIB_80, MIB_80)
    specs = engine_specs(UpConfig(), "m")
    assert given(specs) == [("0", None), ("1", None)]
    assert len(starting_queues(specs, specs)) == 2


def test_memory_that_others_have_is_left_to_them(has_gpus: HasGPUs) -> None:
    has_gpus(MIB_80, MIB_80 // 2)
    assert given(engine_specs(UpConfig(), "m")) == [("0", None), ("1", "0.493")]
    has_gpus(MIB_80, 100)
    with pytest.raises(BadRequest, match=r"device 1, of which 0\.1 GiB are free"):
        engine_specs(UpConfig(), "m")


@pytest.mark.parametrize(
    ("free", "flags", "devices", "share"),
    [
        ((MIB_80,), "", "0", None),
        ((MIB_80, MIB_80), "", "0", None),
        ((MIB_80 // 10, MIB_80), "", "1", None),  # the second engine that is started by hand
        ((MIB_80 // 2,), "", "0", "0.493"),
        ((MIB_80 // 2,), f"{GPU_MEMORY} 0.3", "0", "0.3"),
        ((MIB_80, MIB_80), "-tp 2", "0,1", None),
        ((MIB_80, MIB_80), "-tp 4", None, None),
        ((MIB_80, MIB_80), "-dp 2 --data-parallel-rank 1", None, None),
    ],
)
def test_an_engine_by_itself(
    has_gpus: HasGPUs, free: tuple[int, ...], flags: str, devices: str | None, share: str | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    has_gpus(*free)
    assert app._run(["engine", "--model", str(tmp_path), "--print", "--", *shlex.split(flags)]) == 0
    words = shlex.split(capsys.readouterr().out)
    variables = dict(word.split("=", 1) for word in words[: words.index("python")])
    assert variables.get("CUDA_VISIBLE_DEVICES") == devices
    assert value_of(words[words.index("python") :], GPU_MEMORY) == share
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0+cpu"}, True),  # built from source, as in vLLM's own image for CPUs
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cu129"}, False),
        ({}, False),
    ],
)
def test_what_the_installed_vllm_computes_on(
    installed: dict[str, str], on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(devices, "version", version)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    assert devices.is_cpu_build() is on_cpu
    if on_cpu or not installed:
        assert devices.devices_for_engines({}) == ()
    else:
        with pytest.raises(BadRequest, match=r"needs an NVIDIA GPU.*nvidia-smi is not installed"):
            devices.devices_for_engines({})
        (named,) = devices.devices_for_engines({"CUDA_VISIBLE_DEVICES": "0"})  # a container without the tool
        assert named.handle == "0"
