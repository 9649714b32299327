"""Facts about the parts of this machine that Tercet uses, and the findings of ``tercet doctor`` about them.

Facts are read without loading engines' libraries; :func:`findings_of` judges them and does no I/O.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.cluster.devices import (
    COMPUTE_WITH_BFLOAT16,
    CPUINFO,
    Device,
    cpu_flags,
    is_cpu_build,
    list_devices,
    why_no_devices,
)
from tercet.cluster.engine_command import available_memory
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
    """Facts about a machine; sizes are in bytes, and ``None`` means no limit."""

    cores: int
    cpu_flags: tuple[str, ...]
    memory: int
    devices: tuple[Device, ...]
    # The reason, if there is no device.
    no_devices: str
    other_accelerators: tuple[str, ...]
    rdma: tuple[InfinibandDevice, ...]
    shared_memory: Annotated[int, Meta(ge=0)]
    memlock: int | None
    open_files: int | None
    # The version of the installed vLLM, empty without one.
    vllm: str
    # It is the CPU build.
    vllm_for_cpu: bool
    # The version of CUDA that PyTorch was built for, empty for none.
    cuda: str = ""
    # None if vLLM was not imported to compare them.
    hooks: HookReport | None
    libraries: dict[str, bool]
    # Memory files can be sealed.
    sealed_files: bool
    namespaces: dict[str, str]
    ptrace_scope: int | None
    # This process may read the memory of other processes of its user.
    reads_processes: bool
    compiler: bool
    # Tercet's default ports that are in use.
    ports_taken: tuple[int, ...]


def look_at_machine() -> Machine:
    """Return the facts about this machine; this takes as long as importing vLLM."""
    return msgspec.structs.replace(look_at_once(), hooks=compare_hooks() if _vllm() else HookReport())


def look_at_once() -> Machine:
    """Return the facts that need no import of vLLM; ``hooks`` are None."""
    devices, rdma = list_devices(), list[InfinibandDevice]()
    for device in sorted(RDMA.iterdir()) if RDMA.is_dir() else ():
        with suppress(OSError):
            states = [port.read_text() for port in device.glob("ports/*/state")]
            verbs = [Path("/dev/infiniband") / each.name for each in device.glob("device/infiniband_verbs/*")]
            usable = any(os.access(each, os.R_OK | os.W_OK) for each in verbs)
            rdma.append(InfinibandDevice(device.name, any("ACTIVE" in state for state in states), usable))
    namespaces, ports_taken, sealed_files = dict[str, str](), list[int](), False
    for name in ("net", "ipc", "pid", "user"):
        with suppress(OSError):
            namespaces[name] = os.readlink(f"/proc/self/ns/{name}")
    for port in DEFAULT_PORTS:
        try:
            require_free("127.0.0.1", port)
        except BadRequest:
            ports_taken.append(port)
    with suppress(OSError, AttributeError):
        os.close(create_sealed_file("tercet-doctor", 4096))
        sealed_files = True
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu_flags=tuple(sorted(cpu_flags(CPUINFO.read_text()))) if CPUINFO.exists() else (),
        memory=available_memory(),
        devices=devices,
        no_devices="" if devices else why_no_devices(),
        other_accelerators=tuple(name for name, path in _OTHERS.items() if Path(path).exists()),
        rdma=tuple(rdma),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        vllm=_vllm(),
        vllm_for_cpu=is_cpu_build(),
        cuda=_cuda_of_torch(),
        hooks=None,
        libraries={"nixl": _has_nixl(_cuda_of_torch()), "mooncake": importlib.util.find_spec("mooncake") is not None},
        sealed_files=sealed_files,
        namespaces=namespaces,
        ptrace_scope=_number(PTRACE_SCOPE),
        reads_processes=_can_read_processes(),
        compiler=any(map(shutil.which, ("cc", "gcc", "clang"))),
        ports_taken=tuple(ports_taken),
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


def compare_hooks() -> HookReport:
    """Check the hooks in a separate process: a broken vLLM may end the process that imports it."""
    command = [sys.executable, "-m", "tercet.vllm_plugin.hooks", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HOOKS_SECONDS)
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=HookReport)
    except subprocess.TimeoutExpired:
        return HookReport(error=f"vLLM was not imported within {HOOKS_SECONDS:.0f} s")
    except (OSError, IndexError, msgspec.DecodeError):
        return HookReport(error="vLLM cannot be imported: run python -c 'import vllm' to see why")


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


GIB = 1 << 30
# vLLM's processes communicate through rings in shared memory; PyTorch and NCCL use it, too.
LEAST_SHARED_MEMORY = GIB
LEAST_OPEN_FILES = 4096
# Memory of two CPU engines with the built-in model and a GiB of KV each, and of a router.
LEAST_MEMORY = 8 * GIB
# NVIDIA's "CUDA Toolkit and Corresponding Driver Versions": the first driver for minor versions of a CUDA.
LEAST_DRIVER = {12: 525, 13: 580}
INSTALL_FOR_CPUS = "in a checkout of Tercet: make setup"
INSTALL_FOR_GPUS = "in a checkout of Tercet: pip install '.[cuda]'"
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
SHOWN, SHOWN_LENGTH = 3, 200

State = Literal["ok", "costs", "broken"]


class Finding(msgspec.Struct, frozen=True):
    """The state of one part.

    State ``broken``: engines cannot start. State ``costs``: engines start, but are slower than this machine allows.
    """

    part: str
    state: State
    found: str
    # The effect of a problem, and the remedy; both are empty without one.
    costs: str = ""
    do: str = ""


def findings_of(machine: Machine) -> list[Finding]:
    """Return the findings about all parts, in the order of a machine's setup."""
    return [*_vllm_findings(machine), *_compute(machine), *_transports(machine), *_limits(machine)]


def _vllm_findings(machine: Machine) -> Iterator[Finding]:
    if not machine.vllm:
        do = f"for CPUs {INSTALL_FOR_CPUS}, for GPUs {INSTALL_FOR_GPUS}"
        yield Finding("vLLM", "broken", "not installed", "no engine, and no router", do)
        return
    build = "the CPU build" if machine.vllm_for_cpu else "the build for accelerators"
    if machine.vllm_for_cpu and machine.devices:
        yield Finding(
            "vLLM", "costs", f"{machine.vllm}, {build}", "engines compute on cores, and the devices below are idle",
            f"install vLLM's CUDA build in another environment: {INSTALL_FOR_GPUS}",
        )  # fmt: skip
    elif not machine.vllm_for_cpu and not machine.devices:
        yield Finding(
            "vLLM", "broken", f"{machine.vllm}, {build}", "vLLM finds no device to compute on",
            f"for CPUs {INSTALL_FOR_CPUS}; or let this process see a device: nvidia-smi, CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        yield Finding("vLLM", "ok", f"{machine.vllm}, {build}")
    if machine.hooks is not None:
        yield from hook_findings(machine.hooks)


def hook_findings(hooks: HookReport) -> Iterator[Finding]:
    """Yield what the comparison of the installed vLLM with Tercet's hooks found."""
    if hooks.error:
        do = f"install vLLM again: for CPUs {INSTALL_FOR_CPUS}, for GPUs {INSTALL_FOR_GPUS}"
        if any(name in hooks.error for name in MISMATCHED):  # these fail inside torch
            why = "they do not match a CPU torch, and text models do not need them"
            do = f"pip uninstall -y {' '.join(MISMATCHED)}: {why}"
        yield Finding("hooks", "broken", hooks.error, "no engine, and no router", do)
        return
    sides = (("engines", hooks.engine, "no engine starts"), ("routers", hooks.frontend, "no router starts"))
    for side, unmet, costs in sides:
        if unmet:  # some of the mismatches, shortened: a vLLM of another version has hundreds
            shown = [each if len(each) <= SHOWN_LENGTH else f"{each[:SHOWN_LENGTH]}..." for each in unmet[:SHOWN]]
            more = f"; and {len(unmet) - SHOWN} more" if len(unmet) > SHOWN else ""
            do = "install a version of vLLM that Tercet supports; python -m tercet.vllm_plugin.hooks lists all"
            yield Finding(f"hooks of {side}", "broken", "; ".join(shown) + more, costs, do)
        else:
            yield Finding(f"hooks of {side}", "ok", "all dependencies of Tercet match")


def _compute(machine: Machine) -> Iterator[Finding]:
    for device in machine.devices:
        yield _device(device, machine.vllm_for_cpu)
    if not machine.devices:
        on_cores = "engines compute on cores: enough for trials with small models, too slow for large ones"
        yield Finding(
            "devices", "costs", f"none: {machine.no_devices}",
            on_cores if machine.vllm_for_cpu else "no engine of this build of vLLM starts",
            f"NVIDIA GPUs with their driver, and {INSTALL_FOR_GPUS}; in a container, docker run --gpus all",
        )  # fmt: skip
    needed = LEAST_DRIVER.get(_major(machine.cuda), 0)
    for driver in sorted({device.driver for device in machine.devices if device.driver}):
        if _major(driver) < needed:
            yield Finding(
                "driver", "costs", f"{driver}; PyTorch is built for CUDA {machine.cuda}",
                f"no engine starts, unless NVIDIA's cuda-compat for CUDA {machine.cuda} is installed",
                f"a driver from {needed} on, or a vLLM that is built for an older CUDA",
            )  # fmt: skip
    if machine.devices and not machine.compiler:
        yield Finding(
            "C compiler", "costs", "none", "kernels that are compiled at first use (Triton's) fail",
            "apt-get install gcc, or set CC",
        )  # fmt: skip
    for name in machine.other_accelerators:
        yield Finding(
            name, "costs", "its device file exists", "Tercet starts no engines on it", "start vLLM's own server on it"
        )
    if machine.devices:
        return
    flags, cores = set(machine.cpu_flags), f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    if machine.cores < 2:
        costs = "two engines share one core, and all their steps are slow"
        yield Finding("cores", "costs", cores, costs, "more cores, or --both 1")
    elif flags and not flags & COMPUTE_WITH_BFLOAT16:
        yield Finding(
            "cores", "costs", f"{cores}, no instructions for bfloat16",
            "engines compute in float32, and KV takes twice the memory",
            "nothing: --dtype bfloat16 would be many times as slow",
        )  # fmt: skip
    else:
        yield Finding("cores", "ok", cores)
    found = f"{_gib(machine.memory)} free"
    if machine.memory >= LEAST_MEMORY:
        yield Finding("memory", "ok", found)
    else:
        costs = f"two engines with the built-in model need {_gib(LEAST_MEMORY)}"
        yield Finding("memory", "costs", found, costs, "fewer engines: tercet up --prefill 0 --decode 0 --both 1")


def _device(device: Device, vllm_for_cpu: bool) -> Finding:
    memory = f"{_gib(device.free)} of {_gib(device.memory)} free" if device.memory else "its memory is not reported"
    found = f"{device.name}, {memory}" + (f", driver {device.driver}" if device.driver else "")
    if device.exclusive:
        return Finding(
            f"device {device.handle}", "costs" if vllm_for_cpu else "broken",
            f"{found}, compute mode {device.exclusive}",
            "no engine starts there: several processes of one use its device",
            "nvidia-smi -c DEFAULT, or CUDA's multi-process service",
        )  # fmt: skip
    if device.memory and device.free < device.memory // 2:
        do = "stop other processes there, nvidia-smi lists them; engines use the free memory"
        return Finding(f"device {device.handle}", "costs", found, "little room for weights and KV", do)
    return Finding(f"device {device.handle}", "ok", found)


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdigit() else 0


def _transports(machine: Machine) -> Iterator[Finding]:
    libraries = [name for name, there in machine.libraries.items() if there]
    if machine.sealed_files:
        found = f"memory files can be shared; network namespace {machine.namespaces.get('net', 'unknown')}"
        yield Finding("KV, one machine (host)", "ok", f"{found}; peers must run in the same one, as the same user")
    else:
        yield Finding(
            "KV, one machine (host)", "broken", "memory files cannot be sealed (memfd_create)",
            "no engine starts: such files hold KV of CPU engines and every engine's send table",
            "a kernel from 3.17 on; in a sandbox such as gVisor, allow memfd_create with seals",
        )  # fmt: skip
    if not machine.rdma:
        yield Finding("KV, between machines", "ok", f"no RDMA device: tcp, which needs no setup{_installed(libraries)}")
    over_tcp = "KV between machines uses tcp"
    for device in machine.rdma:  # in the order in which a device is set up: its port, the container, a library
        part = f"RDMA device {device.name}"
        if not device.active:
            do = "activate its port (ibstat), or ask the fabric's administrator"
            yield Finding(part, "costs", "no port is active", over_tcp, do)
        elif not device.usable:
            yield Finding(part, "costs", "this user may not use it", over_tcp, "give the container /dev/infiniband")
        elif not libraries:
            costs, do = f"{over_tcp}, at a fraction of the link's bandwidth", "run scripts/install-transport-extras"
            yield Finding(part, "costs", "neither NIXL nor Mooncake is installed", costs, do)
        else:
            yield Finding(part, "ok", f"active{_installed(libraries)}")
    if machine.rdma and machine.memlock is not None and machine.memlock < machine.memory:
        yield Finding(
            "locked memory", "costs", f"at most {_gib(machine.memlock)}", "KV cannot be registered for RDMA",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity for systemd",
        )  # fmt: skip
    if libraries and not machine.reads_processes:
        scope = "" if machine.ptrace_scope is None else f" (ptrace_scope {machine.ptrace_scope})"
        yield Finding(
            "reading other processes", "costs", f"not allowed{scope}",
            "NIXL copies twice between processes of one machine; Tercet's own transports do not need it",
            "docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0",
        )  # fmt: skip


def _installed(libraries: Sequence[str]) -> str:
    return f"; {', '.join(libraries)} installed" if libraries else ""


def _limits(machine: Machine) -> Iterator[Finding]:
    if machine.shared_memory < LEAST_SHARED_MEMORY:
        yield Finding(
            "/dev/shm", "costs", f"{_gib(machine.shared_memory)} free",
            "engines with several ranks, or large prompts with images, may stop with a bus error",
            "docker run --shm-size 8g, or --ipc host; in Kubernetes an emptyDir with medium Memory at /dev/shm",
        )  # fmt: skip
    else:
        yield Finding("/dev/shm", "ok", f"{_gib(machine.shared_memory)} free")
    if machine.open_files is not None and machine.open_files < LEAST_OPEN_FILES:
        yield Finding(
            "open files", "costs", f"at most {machine.open_files}", "a router refuses further clients",
            f"ulimit -n {LEAST_OPEN_FILES * 16}; LimitNOFILE for systemd",
        )  # fmt: skip
    for port in machine.ports_taken:
        whose = "the router" if port == 8000 else "a single engine"
        yield Finding(
            f"port {port}", "costs", "another process listens there", f"{whose} cannot use its default port",
            "choose another --port, or tercet down",
        )  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
