"""Accelerators of this machine, as ``nvidia-smi`` lists them, without a library or a CUDA context."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

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
    """One GPU, or one instance of a divided one (MIG).

    ``handle`` is the name in ``CUDA_VISIBLE_DEVICES``: a number, or the ``uuid``. ``memory`` is the size in bytes, and
    ``free`` the unused part; both are 0 if unknown. ``exclusive`` is the compute mode if at most one process may use
    the device; empty otherwise. Engines use the instances of a ``divided`` GPU, not the GPU itself.
    """

    handle: str
    name: str = "a device that nvidia-smi does not list"
    memory: int = 0
    free: int = 0
    uuid: str = ""
    driver: str = ""
    exclusive: str = ""
    divided: bool = False


def list_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs that engines may use, limited by ``CUDA_VISIBLE_DEVICES`` if set; empty without GPUs."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return ()
    listed = _listed().devices
    found = tuple(_named(listed, _handles(named))) if named is not None else _usable(listed)
    return tuple(_behind_mps(each, environment) for each in found)


def why_no_devices(environment: Mapping[str, str] = os.environ) -> str:
    """Return, as text, the reason why :func:`list_devices` found no device."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return f"CUDA_VISIBLE_DEVICES is {named!r}, which names no device"
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed; it comes with NVIDIA's driver"
    listed = _listed()
    if listed.trouble:
        return listed.trouble
    if named is not None and listed.devices:
        there = ", ".join(device.handle for device in listed.devices)
        return f"CUDA_VISIBLE_DEVICES is {named!r}, and nvidia-smi lists {there}"
    if any(device.divided for device in listed.devices):
        return "MIG is on, and there are no instances: nvidia-smi mig -lgip, or nvidia-smi -mig 0"
    return "nvidia-smi lists no GPU"


class _Listed(NamedTuple):
    """Devices that ``nvidia-smi`` lists; ``trouble`` is its error if it lists none."""

    devices: tuple[Device, ...] = ()
    trouble: str = ""


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


def parse_instances(listed: str, gpus: Sequence[Device]) -> Iterator[Device]:
    """Yield the instances of divided ``gpus`` in ``nvidia-smi -L``, which does not report their free memory."""
    by_index, gpu = {each.handle: each for each in gpus}, None
    for line in listed.splitlines():
        if (begins := _GPU.match(line)) is not None:
            gpu = by_index.get(begins[1])
        elif gpu is not None and (found := _INSTANCE.match(line)) is not None:
            profile, uuid = found.groups()
            yield Device(uuid, f"MIG {profile} of {gpu.name}", 0, 0, uuid, gpu.driver, gpu.exclusive)


def _listed() -> _Listed:
    program = shutil.which("nvidia-smi")
    if program is None:
        return _Listed()
    printed, trouble = _ask(program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    gpus = parse_devices(printed)
    divided = [each for each in gpus if each.divided]
    instances = tuple(parse_instances(_ask(program, "-L")[0], divided)) if divided else ()
    return _Listed((*gpus, *instances), "" if gpus else trouble)


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


def _usable(listed: Sequence[Device]) -> tuple[Device, ...]:
    """Return each undivided GPU and each instance: CUDA sees only these."""
    return tuple(each for each in listed if not each.divided)


def _handles(named: str) -> list[str]:
    """Return the devices in a value of ``CUDA_VISIBLE_DEVICES`` up to an invalid one; CUDA ignores the rest."""
    found: list[str] = []
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
        found = next((each for each in listed if _is_called(each, handle)), None)
        if found is not None and not found.divided:
            yield found if handle.isdigit() else msgspec.structs.replace(found, handle=found.uuid)
        elif found is not None or not listed or handle.startswith("MIG-"):
            yield Device(handle)  # of a divided GPU, CUDA uses the first instance
        else:
            return


def _is_called(device: Device, handle: str) -> bool:
    return device.handle == handle if handle.isdigit() else device.uuid.startswith(handle)


def _behind_mps(device: Device, environment: Mapping[str, str]) -> Device:
    """Return the device without ``exclusive`` if CUDA's multi-process service shares it between processes."""
    there = Path(environment.get(_MPS_DIRECTORY, _MPS_DEFAULT)) / "control"
    return msgspec.structs.replace(device, exclusive="") if device.exclusive and there.exists() else device


def _mib(text: str) -> int:
    """Return a size in MiB as bytes; 0 for a text, which devices without separate memory have."""
    return int(text) * MIB if text.isdigit() else 0
