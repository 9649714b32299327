"""Assignment of this machine's devices, and of shares of their memory, to engines; pure functions of the devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tercet.cluster.devices import Device
from tercet.protocol import BadRequest

GIB = 1 << 30
# Largest share of a device for one engine, vLLM's default; the rest is for CUDA graphs and fragments.
MOST = 0.92
# Memory of the context and the buffers of the process that moves a worker's KV, in addition to the engine's share.
BESIDE = GIB // 2
# Memory that must remain for that process and for fragments; on a small device vLLM's default leaves less.
LEFT = GIB
# Least memory of an engine, for weights and KV.
LEAST = GIB


class DeviceShare(NamedTuple):
    """An engine's ``devices``, one for each of its ranks, and its share of their memory; ``None`` leaves it to vLLM."""

    devices: tuple[str, ...]
    memory: float | None = None


def plan_devices(
    devices: Sequence[Device], engines: int, each: int = 1, given: float | None = None
) -> list[DeviceShare]:
    """Assign ``each`` devices to every engine: exclusive ones if there are enough, else shared evenly.

    ``given`` is the share of a device's memory, from 0 to 1, that the caller chose for every engine. If other processes
    use a device too, an engine gets the free memory. Engines with several ranks do not share devices, since their ranks
    wait for each other. Raises :class:`~tercet.protocol.BadRequest` for too few devices, or too little memory.
    """
    if engines * each <= len(devices):
        return [_own(devices[index * each : (index + 1) * each], given) for index in range(engines)]
    if each > 1 or not devices:
        raise BadRequest(
            f"--prefill, --decode, --both: {engines} engines with {each} GPUs each need {engines * each}, "
            f"and {len(devices)} can be used; start fewer engines, or name more GPUs in CUDA_VISIBLE_DEVICES",
            "prefill",
        )
    on_each = Counter(index % len(devices) for index in range(engines))
    shares = {index: _share(devices[index], count, given) for index, count in on_each.items()}
    return [
        DeviceShare((devices[index % len(devices)].handle,), shares[index % len(devices)]) for index in range(engines)
    ]


def pick_devices(devices: Sequence[Device], each: int = 1, given: float | None = None) -> DeviceShare:
    """Pick the ``each`` devices with the most free memory for one engine, the first of equal ones.

    If there are fewer, the result is empty and vLLM chooses. Raises :class:`~tercet.protocol.BadRequest` for too little
    memory.
    """
    if each > len(devices):
        return DeviceShare(())
    return _own(sorted(devices, key=lambda device: -device.free)[:each], given)


def _own(devices: Sequence[Device], given: float | None) -> DeviceShare:
    """Return the share of devices that no other engine of this fleet uses."""
    shares = [share for device in devices if (share := _share(device, 1, given)) is not None]
    return DeviceShare(tuple(device.handle for device in devices), min(shares, default=None))


def _share(device: Device, engines: int, given: float | None) -> float | None:
    """Return each engine's share of a device's memory; ``None`` for vLLM's default, or if the caller set one."""
    if device.exclusive:
        raise BadRequest(
            f"CUDA_VISIBLE_DEVICES: device {device.handle} is in compute mode {device.exclusive}, and an engine has "
            "several processes on its device: one that computes, and one that moves its KV; nvidia-smi -c DEFAULT "
            "changes that, or start CUDA's multi-process service",
            "CUDA_VISIBLE_DEVICES",
        )
    if given is not None:
        if given * engines > 1:
            raise BadRequest(
                f"--gpu-memory-utilization: {engines} engines share device {device.handle}, each with {given:g} of its "
                f"memory; choose {math.floor(100 * MOST / engines) / 100:g} or less, or leave it out",
                "--gpu-memory-utilization",
            )
        return None
    enough = device.free >= MOST * device.memory and (1 - MOST) * device.memory >= LEFT
    if engines == 1 and (not device.memory or enough):
        return None
    if not device.memory:
        return math.floor(100 * MOST / engines) / 100
    usable = min(MOST * device.memory, device.free) - engines * BESIDE
    if usable < engines * LEAST:
        free = f"device {device.handle}, of which {device.free / GIB:.1f} GiB are free"
        if engines == 1:
            raise BadRequest(
                f"CUDA_VISIBLE_DEVICES: an engine would use {free}; stop other processes there (nvidia-smi), or name "
                "another device",
                "CUDA_VISIBLE_DEVICES",
            )
        raise BadRequest(
            f"--prefill, --decode, --both: {engines} engines would share {free}; start fewer, or stop other processes "
            "there (nvidia-smi)",
            "prefill",
        )
    return (
        math.floor(1000 * usable / engines / device.memory) / 1000
    )  # the smallest share of a large device is below 1%
