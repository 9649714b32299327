"""Devices as `nvidia-smi` lists them, and as `CUDA_VISIBLE_DEVICES` chooses among them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.devices import (
    BESIDE,
    Device,
    DeviceShare,
    list_devices,
    parse_devices,
    pick_devices,
    plan_devices,
    why_no_devices,
)
from tercet.protocol import BadRequest

GIB = 1 << 30
LISTED = """\
0, GPU-1f2e, NVIDIA H100 80GB HBM3, 81920, 81000, 580.65.06, Default, Disabled
1, GPU-77aa, NVIDIA H100 80GB HBM3, 81920, 1024, 580.65.06, Default, Disabled
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
    (only,) = parse_devices("0, GPU-9, NVIDIA GB10, [N/A], [N/A], 580.65.06, Default, [N/A]\n")
    assert (only.memory, only.free) == (0, 0)


@pytest.mark.parametrize(
    ("named", "handles"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-77", ["GPU-77aa"]),  # as vLLM needs it
        ("GPU-77aa,GPU-1f2e", ["GPU-77aa", "GPU-1f2e"]),
        ("0,7,1", ["0"]),  # CUDA stops at what there is not
        ("7", []),
        ("GPU-99", []),
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


@pytest.mark.parametrize("named", ["7", "GPU-12345678", "MIG-GPU-63feeb45/1/0"])
def test_where_nothing_is_listed_a_named_device_is_believed(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers that have the driver's libraries, and not its tool."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (unknown,) = list_devices({"CUDA_VISIBLE_DEVICES": named})
    assert (unknown.handle, unknown.memory) == (named, 0)


def test_a_machine_without_the_tool_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_devices({}) == ()


def test_a_tool_that_fails_lists_none(machine: Path) -> None:
    machine.write_text("#!/bin/sh\nexit 9\n")
    assert list_devices({}) == ()


def test_why_there_are_none(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_VISIBLE_DEVICES is ''" in why_no_devices({"CUDA_VISIBLE_DEVICES": ""})
    machine.write_text("#!/bin/sh\nexit 9\n")
    assert why_no_devices({}) == "nvidia-smi ends with exit code 9: nothing"
    machine.write_text(TOOL)
    assert why_no_devices({"CUDA_VISIBLE_DEVICES": "7"}) == "CUDA_VISIBLE_DEVICES is '7', and nvidia-smi lists 0, 1"
    machine.write_text("#!/bin/sh\n")
    assert why_no_devices({}) == "nvidia-smi lists no GPU"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "nvidia-smi is not installed" in why_no_devices({})


# ---- what it prints on real machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n\n",
            "",
        ),
        (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.86\n", ""),
        (255, "Failed to initialize NVML: Unknown Error\n", ""),  # in a container, after systemd has reloaded
        (4, "Failed to initialize NVML: Insufficient Permissions\n", ""),
        (6, "No devices were found\n", ""),
        (127, "", "nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1\n"),
    ],
)
def test_what_the_tool_complains_of_is_passed_on(machine: Path, code: int, out: str, err: str) -> None:
    machine.write_text(f"#!/bin/sh\ncat <<'END'\n{out}END\ncat >&2 <<'END'\n{err}END\nexit {code}\n")
    assert list_devices({}) == ()
    assert why_no_devices({}) == f"nvidia-smi ends with exit code {code}: {(out + err).strip().splitlines()[0]}"


def test_devices_beside_one_that_is_lost(machine: Path) -> None:
    lost = "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot the system to recover\n"
    machine.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}{lost}END\nexit 15\n")
    assert [each.handle for each in list_devices({})] == ["0", "1"]


DIVIDED = """\
0, GPU-63feeb45, NVIDIA H100 80GB HBM3, 81559, 81007, 580.65.06, Default, Enabled
1, GPU-be7ab1c0, NVIDIA H100 80GB HBM3, 81559, 81007, 580.65.06, Default, Disabled
"""
INSTANCES = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-63feeb45)
  MIG 3g.40gb     Device  0: (UUID: MIG-7089d0f3-293f-58c9-8f8c-5ea666eedbde)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-56c30729-347f-5dd6-8da0-c3cc59e969e0)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-be7ab1c0)
"""


@pytest.fixture
def divided(machine: Path) -> Path:
    """A machine of which the first GPU is divided into instances."""
    listing = f"#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'END'\n{INSTANCES}END\nelse cat <<'END'\n{DIVIDED}END\nfi\n"
    machine.write_text(listing)
    return machine


@pytest.mark.usefixtures("divided")
def test_a_divided_gpu_is_its_instances() -> None:
    whole, first, second = list_devices({})
    assert (whole.handle, whole.memory > 0) == ("1", True)
    assert (first.handle, first.name) == (
        "MIG-7089d0f3-293f-58c9-8f8c-5ea666eedbde", "MIG 3g.40gb of NVIDIA H100 80GB HBM3",
    )  # fmt: skip
    assert (second.memory, second.free, second.driver) == (0, 0, "580.65.06")
    (named,) = list_devices({"CUDA_VISIBLE_DEVICES": "MIG-56c3"})
    assert named.handle == second.handle
    (by_number,) = list_devices({"CUDA_VISIBLE_DEVICES": "0"})
    assert (by_number.handle, by_number.memory) == ("0", 0)


def test_a_gpu_that_is_divided_into_nothing_is_none(divided: Path) -> None:
    only = DIVIDED.splitlines()[0]
    divided.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || echo '{only}'\n")
    assert list_devices({}) == ()
    assert "MIG is on" in why_no_devices({})


def test_a_device_for_one_process_alone(machine: Path, tmp_path: Path) -> None:
    machine.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA A100, 40960, 40000, 535.54, Exclusive_Process, Disabled'\n")
    (device,) = list_devices({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")})
    assert device.exclusive == "Exclusive_Process"
    (tmp_path / "control").touch()
    (device,) = list_devices({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert device.exclusive == "", "its daemon lets several in"


# Which engine gets which devices, and what share of their memory.


def gpus(count: int, memory: int = 80, free: int | None = None) -> list[Device]:
    left = memory if free is None else free
    return [Device(str(index), "GPU", memory * GIB, left * GIB) for index in range(count)]


EXCLUSIVE = Device("0", "GPU", 80 * GIB, 80 * GIB, exclusive="Exclusive_Process")


@pytest.mark.parametrize(
    ("devices", "engines", "each", "plan"),
    [
        (gpus(1), 1, 1, [DeviceShare(("0",))]),
        (gpus(2), 2, 1, [DeviceShare(("0",)), DeviceShare(("1",))]),
        (gpus(4), 2, 2, [DeviceShare(("0", "1")), DeviceShare(("2", "3"))]),
        (gpus(4), 3, 1, [DeviceShare(("0",)), DeviceShare(("1",)), DeviceShare(("2",))]),
        # A first-time user with one GPU.
        (gpus(1), 2, 1, [DeviceShare(("0",), 0.453), DeviceShare(("0",), 0.453)]),
        (gpus(1, 16), 2, 1, [DeviceShare(("0",), 0.428), DeviceShare(("0",), 0.428)]),
        # Of a small device vLLM's own share leaves too little to the process that moves KV.
        (gpus(1, 8), 1, 1, [DeviceShare(("0",), 0.857)]),
        (gpus(1, 16), 1, 1, [DeviceShare(("0",))]),
        # Somebody has half of it already.
        (gpus(1, 80, 40), 2, 1, [DeviceShare(("0",), 0.243), DeviceShare(("0",), 0.243)]),
        # As little as an engine can do with, of a large device.
        (gpus(1, 101, 3), 2, 1, [DeviceShare(("0",), 0.009), DeviceShare(("0",), 0.009)]),
        # Where nobody says how much memory there is.
        ([Device("7")], 2, 1, [DeviceShare(("7",), 0.46), DeviceShare(("7",), 0.46)]),
        # One engine beside what others do there.
        (gpus(1, 80, 40), 1, 1, [DeviceShare(("0",), 0.493)]),
        ([*gpus(1, 80, 40), Device("1", "GPU", 80 * GIB, 80 * GIB)], 1, 2, [DeviceShare(("0", "1"), 0.493)]),
        # Three on two: the first device has two of them, the other one is its engine's alone.
        (gpus(2), 3, 1, [DeviceShare(("0",), 0.453), DeviceShare(("1",), None), DeviceShare(("0",), 0.453)]),
    ],
)
def test_plans(devices: list[Device], engines: int, each: int, plan: list[DeviceShare]) -> None:
    assert plan_devices(devices, engines, each) == plan


@pytest.mark.parametrize(
    ("devices", "engines", "each", "given", "says"),
    [
        (gpus(4), 3, 2, None, "3 engines with 2 GPUs each need 6, and 4 can be used"),
        (gpus(1, 80, 2), 2, 1, None, "2 engines would share device 0, of which 2.0 GiB are free"),
        (gpus(1), 2, 1, 0.6, "choose 0.46 or less"),
        ([], 1, 1, None, "need 1, and 0 can be used"),
        ([EXCLUSIVE], 1, 1, None, "device 0 is in compute mode Exclusive_Process"),
        ([EXCLUSIVE], 1, 1, 0.5, "device 0 is in compute mode Exclusive_Process"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    devices: list[Device], engines: int, each: int, given: float | None, says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        plan_devices(devices, engines, each, given)


A, B = gpus(2)
BUSY = Device("0", "GPU", 80 * GIB, 20 * GIB)


@pytest.mark.parametrize(
    ("devices", "each", "picked"),
    [
        ([A], 1, DeviceShare(("0",))),
        ([A, B], 1, DeviceShare(("0",))),
        ([B, A], 1, DeviceShare(("1",))),  # as CUDA_VISIBLE_DEVICES has them
        # The second engine of a machine with two.
        ([BUSY, B], 1, DeviceShare(("1",))),
        ([BUSY], 1, DeviceShare(("0",), 0.243)),
        ([BUSY, B], 2, DeviceShare(("1", "0"), 0.243)),
        # On several machines, or more than there are: vLLM says what is wrong, if something is.
        ([A, B], 4, DeviceShare(())),
    ],
)
def test_an_engine_by_itself_gets_what_is_free(devices: list[Device], each: int, picked: DeviceShare) -> None:
    assert pick_devices(devices, each) == picked


def test_an_engine_is_not_started_on_a_device_that_is_full() -> None:
    with pytest.raises(BadRequest, match=r"of which 1\.0 GiB are free"):
        pick_devices(gpus(1, 80, 1))
    assert pick_devices(gpus(1, 80, 1), given=0.01) == DeviceShare(("0",))


def test_a_share_that_the_caller_gave_stays_his() -> None:
    assert [each.memory for each in plan_devices(gpus(1), 2, 1, 0.4)] == [None, None]


@given(st.integers(1, 8), st.integers(1, 24), st.integers(8, 192), st.data())
def test_no_device_is_promised_twice(count: int, engines: int, memory: int, data: st.DataObject) -> None:
    devices = gpus(count, memory, data.draw(st.integers(0, memory)))
    try:
        plan = plan_devices(devices, engines)
    except BadRequest:
        return
    assert all(len(share.devices) == 1 for share in plan)
    users = Counter(handle for share in plan for handle in share.devices)
    assert max(users.values()) - min(users.values()) <= 1
    for device in devices:
        mine = [share for share in plan if share.devices == (device.handle,)]
        if len(mine) > 1:
            promised = sum(share.memory or 1 for share in mine) * device.memory + len(mine) * BESIDE
            assert promised < device.free + 1  # byte; shares are floats
