"""Devices as `nvidia-smi` lists them, and as `CUDA_VISIBLE_DEVICES` chooses among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cluster.devices import Device, list_devices, parse_devices, why_no_devices

GIB = 1 << 30
LISTED = """\
0, GPU-1f2e, NVIDIA H100 80GB HBM3, 81920, 81000, 580.65.06
1, GPU-77aa, NVIDIA H100 80GB HBM3, 81920, 1024, 580.65.06
"""
TOOL = f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose `nvidia-smi` lists two devices."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tool


def test_a_line_for_each_device() -> None:
    first, second = parse_devices(LISTED)
    assert first == Device("0", "NVIDIA H100 80GB HBM3", 80 * GIB, 81000 << 20, "GPU-1f2e", "580.65.06")
    assert (second.handle, second.free) == ("1", GIB)


@pytest.mark.parametrize(
    "listed", ["", "No devices were found\n", "Failed to initialize NVML: no, driver, at, all, x\n"]
)
def test_what_says_something_else_lists_none(listed: str) -> None:
    assert parse_devices(listed) == ()


def test_memory_that_is_not_the_devices_own() -> None:
    (only,) = parse_devices("0, GPU-9, NVIDIA GB10, [N/A], [N/A], 580.65.06\n")
    assert (only.memory, only.free) == (0, 0)


@pytest.mark.parametrize(
    ("named", "handles"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-77", ["GPU-77"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
@pytest.mark.usefixtures("machine")
def test_the_environment_chooses(named: str | None, handles: list[str]) -> None:
    found = list_devices({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    assert [each.handle for each in found] == handles
    assert all(each.memory == 80 * GIB for each in found)


@pytest.mark.usefixtures("machine")
def test_a_device_that_the_tool_does_not_know_is_one_all_the_same() -> None:
    (unknown,) = list_devices({"CUDA_VISIBLE_DEVICES": "7"})
    assert (unknown.handle, unknown.memory) == ("7", 0)


def test_a_machine_without_the_tool_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_devices({}) == ()


def test_a_tool_that_fails_lists_none(machine: Path) -> None:
    machine.write_text("#!/bin/sh\nexit 9\n")
    assert list_devices({}) == ()


def test_why_there_are_none(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_VISIBLE_DEVICES is ''" in why_no_devices({"CUDA_VISIBLE_DEVICES": ""})
    machine.write_text("#!/bin/sh\nexit 9\n")
    assert why_no_devices({}) == "nvidia-smi lists no GPU"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "no nvidia-smi" in why_no_devices({})
