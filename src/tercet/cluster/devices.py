"""The accelerators of this machine, as NVIDIA's own tool lists them: no library is loaded, and no context made."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

MIB = 1 << 20
QUERY_SECONDS = 30.0
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")


class Device(msgspec.Struct, frozen=True):
    """One GPU. ``handle`` is what ``CUDA_VISIBLE_DEVICES`` calls it: a number, or (the beginning of) its ``uuid``.

    ``memory`` are its bytes, and ``free`` those that nobody uses now; both are 0 where nobody says.
    """

    handle: str
    name: str = "a device that nvidia-smi does not list"
    memory: int = 0
    free: int = 0
    uuid: str = ""
    driver: str = ""


def list_devices(environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """NVIDIA GPUs that engines may use, by ``CUDA_VISIBLE_DEVICES`` if it is set; none on a CPU machine."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return ()
    found = parse_devices(_listed())
    return found if named is None else tuple(_named(found, handle) for handle in _handles(named))


def why_no_devices(environment: Mapping[str, str] = os.environ) -> str:
    """Why :func:`list_devices` found none, in words."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None and not _handles(named):
        return f"CUDA_VISIBLE_DEVICES is {named!r}, which names none"
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi, with which NVIDIA's driver comes"
    return "nvidia-smi lists no GPU"


def parse_devices(listed: str) -> tuple[Device, ...]:
    """What ``nvidia-smi --query-gpu`` prints, a line for each device; lines that say something else are passed over."""
    found: list[Device] = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_FIELDS) or not parts[0].isdigit():
            continue
        index, uuid, name, memory, free, driver = parts
        found.append(Device(index, name, _mib(memory), _mib(free), uuid, driver))
    return tuple(found)


def _listed() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _handles(named: str) -> list[str]:
    """The devices that a value of ``CUDA_VISIBLE_DEVICES`` names; CUDA passes over what follows one that is none."""
    found: list[str] = []
    for each in map(str.strip, named.split(",")):
        if not each or each == "-1":
            break
        found.append(each)
    return found


def _named(devices: Sequence[Device], handle: str) -> Device:
    for each in devices:
        if each.handle == handle or (not handle.isdigit() and each.uuid.startswith(handle)):
            return msgspec.structs.replace(each, handle=handle)
    return Device(handle)


def _mib(text: str) -> int:
    """Devices without memory of their own say so in words."""
    return int(text) * MIB if text.isdigit() else 0
