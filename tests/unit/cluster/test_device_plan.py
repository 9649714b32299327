"""Which engine gets which devices, and what share of their memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.devices import BESIDE, Device, DeviceShare, pick_devices, plan_devices
from tercet.protocol import BadRequest

GIB = 1 << 30


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
