"""What `tercet doctor` makes of a machine: what costs what, what is broken, and what to do."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from tercet.cli import doctor as command
from tercet.cli.app import exit_code_of
from tercet.cli.doctor import doctor, in_words
from tercet.cluster import machine
from tercet.cluster.devices import Device
from tercet.cluster.machine import Finding, HookReport, InfinibandDevice, Machine, findings_of, look_at_machine
from tests.sources import modules

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
WELL = Machine(
    cores=16,
    cpu_flags=("avx512f",),
    memory=64 * GIB,
    devices=(),
    no_devices="nvidia-smi lists no GPU",
    other_accelerators=(),
    rdma=(),
    shared_memory=32 * GIB,
    memlock=None,
    open_files=1 << 20,
    vllm="0.32.0",
    vllm_for_cpu=True,
    hooks=HookReport(),
    libraries={"nixl": True, "mooncake": False},
    sealed_files=True,
    namespaces={"net": "net:[1]"},
    ptrace_scope=1,
    reads_processes=True,
    compiler=True,
    ports_taken=(),
)
GPU = Device("0", "H100", 80 * GIB, 79 * GIB, driver="580.65.06")
ON_GPU = msgspec.structs.replace(WELL, devices=(GPU,), no_devices="", vllm_for_cpu=False, cuda="13.0")
# What machines without and with devices lack by themselves.
LACKS = {False: {"devices"}, True: set[str]()}


def worst(machine: Machine) -> dict[str, Finding]:
    return {each.part: each for each in findings_of(machine) if each.state != "ok"}


def test_a_machine_that_has_all_it_needs_costs_nothing() -> None:
    assert worst(ON_GPU) == {}


def test_a_machine_without_devices_is_told_what_that_costs_and_why_there_are_none() -> None:
    (found,) = worst(WELL).values()
    assert (found.part, found.state, found.found) == ("devices", "costs", "none: nvidia-smi lists no GPU")
    assert "cores" in found.costs
    assert "GPU" in found.do
    assert "no engine" in worst(msgspec.structs.replace(WELL, vllm_for_cpu=False))["devices"].costs


RDMA = (InfinibandDevice("mlx5_0", active=True, usable=True),)


@pytest.mark.parametrize(
    ("machine", "change", "part", "state"),
    [
        (WELL, {"vllm": ""}, "vLLM", "broken"),
        (WELL, {"vllm_for_cpu": False}, "vLLM", "broken"),
        (ON_GPU, {"vllm_for_cpu": True}, "vLLM", "costs"),
        (WELL, {"hooks": HookReport(engine=("block pool: gone",))}, "hooks of engines", "broken"),
        (WELL, {"hooks": HookReport(frontend=("client: gone",))}, "hooks of routers", "broken"),
        (WELL, {"hooks": HookReport(error="cannot be imported")}, "hooks", "broken"),
        (ON_GPU, {"devices": (msgspec.structs.replace(GPU, free=GIB),)}, "device 0", "costs"),
        (ON_GPU, {"devices": (msgspec.structs.replace(GPU, exclusive="Prohibited"),)}, "device 0", "broken"),
        (ON_GPU, {"devices": (msgspec.structs.replace(GPU, driver="570.86.15"),)}, "driver", "costs"),
        (ON_GPU, {"compiler": False}, "C compiler", "costs"),
        (WELL, {"other_accelerators": ("AMD (ROCm)",)}, "AMD (ROCm)", "costs"),
        (WELL, {"cores": 1}, "cores", "costs"),
        (WELL, {"cpu_flags": ("avx2",)}, "cores", "costs"),
        (WELL, {"memory": GIB}, "memory", "costs"),
        (WELL, {"sealed_files": False}, "KV, one machine (host)", "broken"),
        (WELL, {"rdma": (InfinibandDevice("mlx5_0", active=False, usable=True),)}, "RDMA device mlx5_0", "costs"),
        (WELL, {"rdma": (InfinibandDevice("mlx5_0", active=True, usable=False),)}, "RDMA device mlx5_0", "costs"),
        (WELL, {"rdma": RDMA, "libraries": {"nixl": False, "mooncake": False}}, "RDMA device mlx5_0", "costs"),
        (WELL, {"rdma": RDMA, "memlock": 64 << 10}, "locked memory", "costs"),
        (WELL, {"reads_processes": False}, "reading other processes", "costs"),
        (WELL, {"shared_memory": 64 << 20}, "/dev/shm", "costs"),
        (WELL, {"open_files": 1024}, "open files", "costs"),
        (WELL, {"ports_taken": (8000,)}, "port 8000", "costs"),
    ],
)  # fmt: skip
def test_each_missing_part_says_what_it_costs_and_what_to_do(
    machine: Machine, change: dict[str, object], part: str, state: str
) -> None:
    found = worst(msgspec.structs.replace(machine, **change))
    assert {*found} == {part} | LACKS[bool(machine.devices)]
    assert found[part].state == state
    assert found[part].costs
    assert found[part].do


def test_limits_for_rdma_do_not_matter_without_it() -> None:
    assert worst(msgspec.structs.replace(ON_GPU, memlock=64 << 10)) == {}
    assert worst(msgspec.structs.replace(ON_GPU, reads_processes=False, libraries={})) == {}


def test_what_is_broken_stands_last() -> None:
    lines = list(in_words(findings_of(msgspec.structs.replace(WELL, sealed_files=False, cores=1))))
    assert [line.split()[0] for line in lines if not line.startswith(" ")][-2:] == ["costs", "broken"]


@pytest.mark.parametrize(("vllm", "code"), [("0.32.0", 0), ("", 1)])
def test_the_exit_code_is_for_scripts(
    vllm: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "look_at_machine", lambda: msgspec.structs.replace(WELL, vllm=vllm))
    try:
        found = exit_code_of(lambda: doctor(as_json=True))
    except command.typer.Exit as ended:
        found = ended.exit_code
    assert found == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["machine"]["vllm"] == vllm
    assert any(each["state"] == "broken" for each in printed["findings"]) == (code == 1)


@pytest.mark.parametrize("error", ["", "vLLM cannot be imported"])
def test_what_needs_no_import_is_said_before_vllm_is_imported(
    error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []

    def compare() -> HookReport:
        before.extend(capsys.readouterr().out.splitlines())
        return HookReport(error=error)

    monkeypatch.setattr(machine, "look_at_once", lambda: msgspec.structs.replace(WELL, hooks=None))
    monkeypatch.setattr(machine, "compare_hooks", compare)
    if error:
        with pytest.raises(command.typer.Exit):
            doctor()
    else:
        doctor()
    after = capsys.readouterr().out.splitlines()
    assert any("vLLM" in line for line in before)
    assert not any("hooks" in line for line in before)
    assert "hooks" in after[0]
    assert after[-1] == ("broken: hooks; engines cannot start here" if error else "engines can start here")


def test_this_machine_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.cluster.machine.compare_hooks", HookReport)
    machine = look_at_machine()
    assert machine.cores > 0
    assert machine.memory > 0
    assert machine.sealed_files
    assert "net" in machine.namespaces


@pytest.mark.parametrize(
    ("line", "version"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.9'", "12.9"), ("cuda: Optional[str] = None", "")],
)
def test_the_cuda_that_pytorch_is_built_for(line: str, version: str) -> None:
    written = f"__all__ = ['cuda', 'hip']\n__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n"
    assert machine.cuda_in(written) == version


@pytest.mark.parametrize(
    ("cuda", "installed", "has"),
    [
        ("", ("nixl", "nixl_cu12"), True),
        ("12.9", ("nixl", "nixl_cu12"), True),
        ("13.0", ("nixl", "nixl_cu12"), False),  # nixl's own words: detected CUDA 13 but nixl-cu13 is not installed
        ("13.0", ("nixl", "nixl_cu12", "nixl_cu13"), True),
        ("13.0", (), False),
    ],
)
def test_nixl_is_there_if_it_can_be_loaded(
    cuda: str, installed: tuple[str, ...], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert machine._has_nixl(cuda) is has


def test_a_vllm_that_cannot_be_imported_is_one_finding_with_its_remedy() -> None:
    error = "vLLM cannot be imported: RuntimeError: operator torchvision::nms does not exist"
    (found,) = (
        each
        for each in findings_of(msgspec.structs.replace(WELL, hooks=HookReport(error=error)))
        if each.part == "hooks"
    )
    assert (found.state, found.found) == ("broken", error)
    assert found.do.startswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_hundreds_of_things_that_do_not_match_are_a_few_lines() -> None:
    unmet = tuple(f"hook {number}: {'x' * 1000}" for number in range(300))
    printed = "\n".join(in_words(findings_of(msgspec.structs.replace(WELL, hooks=HookReport(engine=unmet)))))
    assert len(printed) < 4000
    assert "and 297 more" in printed


def test_no_remedy_names_an_extra_that_there_is_not() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for _, path in modules()]
    texts += [(ROOT / "README.md").read_text(), *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    for extra in {found for text in texts for found in re.findall(r"pip install[^\n`]*?'\S*\[(\w+)\]'", text)}:
        assert extra in declared
