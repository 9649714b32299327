"""Facts about the parts of this machine that Tercet uses, read without loading engines' libraries."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tercet.cluster.compute import CPUINFO, cpu_flags, is_cpu_build
from tercet.cluster.devices import Device, list_devices, why_no_devices
from tercet.cluster.foresight import available_memory
from tercet.cluster.ports import require_free
from tercet.protocol import BadRequest, TercetError
from tercet.transport import create_sealed_file
from tercet.vllm_plugin.hooks import vllm_version

RDMA = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
# Timeout of importing vLLM to read its code, cold disk included.
HOOKS_SECONDS = 180.0
# The default ports of `tercet up` and `tercet engine`.
DEFAULT_PORTS = (8000, 8001)


class InfinibandDevice(msgspec.Struct, frozen=True):
    """An RDMA device; ``active``: one of its ports is up, ``usable``: this process may use it."""

    name: str
    active: bool
    usable: bool


class HookReport(msgspec.Struct, frozen=True):
    """Mismatches between vLLM and the hooks of engines and routers; ``error`` is the reason if they are unknown."""

    engine: tuple[str, ...] = ()
    frontend: tuple[str, ...] = ()
    error: str = ""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a machine; sizes are in bytes, and ``None`` means no limit.

    ``no_devices`` is the reason as text if there is no device. ``vllm`` is the version of the installed vLLM, empty
    without one; ``vllm_for_cpu`` is True for the CPU build. ``cuda`` is the version of CUDA that PyTorch was built for,
    empty for none. ``sealed_files`` is True if memory files can be sealed, ``reads_processes`` if this process may read
    the memory of other processes of its user. ``ports_taken`` are Tercet's default ports that are in use.
    """

    cores: int
    cpu_flags: tuple[str, ...]
    memory: int
    devices: tuple[Device, ...]
    no_devices: str
    other_accelerators: tuple[str, ...]
    rdma: tuple[InfinibandDevice, ...]
    shared_memory: Annotated[int, Meta(ge=0)]
    memlock: int | None
    open_files: int | None
    vllm: str
    vllm_for_cpu: bool
    cuda: str = ""
    hooks: HookReport
    libraries: dict[str, bool]
    sealed_files: bool
    namespaces: dict[str, str]
    ptrace_scope: int | None
    reads_processes: bool
    compiler: bool
    ports_taken: tuple[int, ...]


def look_at_machine() -> Machine:
    """Return the facts about this machine; this takes as long as importing vLLM."""
    devices = list_devices()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu_flags=tuple(sorted(cpu_flags(CPUINFO.read_text()))) if CPUINFO.exists() else (),
        memory=available_memory(),
        devices=devices,
        no_devices="" if devices else why_no_devices(),
        other_accelerators=tuple(name for name, path in _OTHERS.items() if Path(path).exists()),
        rdma=_rdma_devices(),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        vllm=_vllm(),
        vllm_for_cpu=is_cpu_build(),
        cuda=_cuda_of_torch(),
        hooks=_hooks() if _vllm() else HookReport(),
        libraries={"nixl": _has_nixl(_cuda_of_torch()), "mooncake": importlib.util.find_spec("mooncake") is not None},
        sealed_files=_can_seal(),
        namespaces=_namespaces(),
        ptrace_scope=_number(PTRACE_SCOPE),
        reads_processes=_can_read_processes(),
        compiler=any(map(shutil.which, ("cc", "gcc", "clang"))),
        ports_taken=tuple(port for port in DEFAULT_PORTS if not _is_free(port)),
    )


_OTHERS = {"AMD (ROCm)": "/dev/kfd", "Intel Gaudi": "/dev/accel/accel0", "Ascend": "/dev/davinci0"}


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _vllm() -> str:
    try:
        return vllm_version()
    except TercetError:
        return ""


def _cuda_of_torch() -> str:
    """Return the CUDA version in the files of the installed PyTorch, whose import would take seconds."""
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        with suppress(OSError):
            return cuda_in(Path(found.origin).with_name("version.py").read_text())
    return ""


def cuda_in(version_file: str) -> str:
    """Return the version of CUDA in the text of PyTorch's ``version.py``; empty if it names none."""
    written = re.search(r"^cuda\b[^=]*= *['\"]([0-9.]+)['\"]", version_file, re.MULTILINE)
    return "" if written is None else written[1]


def _has_nixl(cuda: str) -> bool:
    """True if NIXL can be loaded; a PyTorch for CUDA needs the NIXL build for that CUDA."""
    build = f"nixl_cu{cuda.partition('.')[0]}" if cuda else "nixl"
    return importlib.util.find_spec("nixl") is not None and importlib.util.find_spec(build) is not None


def _hooks() -> HookReport:
    """Check the hooks in a separate process: a broken vLLM may end the process that imports it."""
    command = [sys.executable, "-m", "tercet.vllm_plugin.hooks", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HOOKS_SECONDS)
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=HookReport)
    except subprocess.TimeoutExpired:
        return HookReport(error=f"vLLM was not imported within {HOOKS_SECONDS:.0f} s")
    except (OSError, IndexError, msgspec.DecodeError):
        return HookReport(error="vLLM cannot be imported: run python -c 'import vllm' to see why")


def _rdma_devices() -> tuple[InfinibandDevice, ...]:
    found: list[InfinibandDevice] = []
    for device in sorted(RDMA.iterdir()) if RDMA.is_dir() else ():
        with suppress(OSError):
            states = [port.read_text() for port in device.glob("ports/*/state")]
            verbs = [Path("/dev/infiniband") / each.name for each in device.glob("device/infiniband_verbs/*")]
            usable = any(os.access(each, os.R_OK | os.W_OK) for each in verbs)
            found.append(InfinibandDevice(device.name, any("ACTIVE" in state for state in states), usable))
    return tuple(found)


def _can_seal() -> bool:
    try:
        os.close(create_sealed_file("tercet-doctor", 4096))
    except (OSError, AttributeError):
        return False
    return True


def _namespaces() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("net", "ipc", "pid", "user"):
        with suppress(OSError):
            found[name] = os.readlink(f"/proc/self/ns/{name}")
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _can_read_processes() -> bool:
    """True if ``process_vm_readv`` of a child works; libraries copy with it on one machine (UCX calls it CMA)."""
    ready, theirs = os.pipe()
    word, room = ctypes.create_string_buffer(b"tercet"), ctypes.create_string_buffer(8)
    child = os.fork()
    if child == 0:  # the child is a copy of this process, with the word at the same address
        with suppress(BaseException):
            os.read(ready, 1)
        os._exit(0)
    try:
        here, there = _Span(ctypes.addressof(room), 6), _Span(ctypes.addressof(word), 6)
        library = ctypes.CDLL(None, use_errno=True)
        read = library.process_vm_readv(child, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        return read == 6 and room.raw[:6] == b"tercet"
    except AttributeError:
        return False
    finally:
        os.write(theirs, b".")
        os.waitpid(child, 0)
        os.close(ready)
        os.close(theirs)


def _is_free(port: int) -> bool:
    try:
        require_free("127.0.0.1", port)
    except BadRequest:
        return False
    return True
