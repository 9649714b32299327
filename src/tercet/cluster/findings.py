"""Findings about a machine's parts: their state, the cost of a missing part, and the remedy.

This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from tercet.cluster.compute import COMPUTE_WITH_BFLOAT16
from tercet.cluster.devices import Device
from tercet.cluster.machine import InfinibandDevice, Machine

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
    """The state of one part. ``costs`` is the effect of a problem, and ``do`` the remedy; both are empty without one.

    State ``broken``: engines cannot start. State ``costs``: engines start, but are slower than this machine allows.
    """

    part: str
    state: State
    found: str
    costs: str = ""
    do: str = ""


def findings_of(machine: Machine) -> list[Finding]:
    """Return the findings about all parts, in the order of a machine's setup."""
    return [
        *_vllm(machine),
        *_compute(machine),
        *_transports(machine),
        *_limits(machine),
    ]


def _vllm(machine: Machine) -> Iterator[Finding]:
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
    hooks = machine.hooks
    if hooks.error:
        yield Finding("hooks", "broken", hooks.error, "no engine, and no router", _remedy(hooks.error))
        return
    sides = (("engines", hooks.engine, "no engine starts"), ("routers", hooks.frontend, "no router starts"))
    for side, unmet, costs in sides:
        if unmet:
            do = "install a version of vLLM that Tercet supports; python -m tercet.vllm_plugin.hooks lists all"
            yield Finding(f"hooks of {side}", "broken", _first_of(unmet), costs, do)
        else:
            yield Finding(f"hooks of {side}", "ok", "all dependencies of Tercet match")


def _remedy(error: str) -> str:
    """Return the remedy for a vLLM that cannot be imported; the packages of ``MISMATCHED`` fail inside ``torch``."""
    if any(name in error for name in MISMATCHED):
        return (
            f"pip uninstall -y {' '.join(MISMATCHED)}: they do not match a CPU torch, and text models do not need them"
        )
    return f"install vLLM again: for CPUs {INSTALL_FOR_CPUS}, for GPUs {INSTALL_FOR_GPUS}"


def _first_of(unmet: Sequence[str]) -> str:
    """Return some of the mismatches, shortened: a vLLM of another version has hundreds."""
    shown = [each if len(each) <= SHOWN_LENGTH else f"{each[:SHOWN_LENGTH]}..." for each in unmet[:SHOWN]]
    more = len(unmet) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _compute(machine: Machine) -> Iterator[Finding]:
    yield from _devices(machine)
    yield from _driver(machine)
    if machine.devices and not machine.compiler:
        yield Finding(
            "C compiler", "costs", "none", "kernels that are compiled at first use (Triton's) fail",
            "apt-get install gcc, or set CC",
        )  # fmt: skip
    for name in machine.other_accelerators:
        yield Finding(
            name, "costs", "its device file exists", "Tercet starts no engines on it", "start vLLM's own server on it"
        )
    if not machine.devices:
        yield _cores(machine)
        yield _memory(machine)


def _devices(machine: Machine) -> Iterator[Finding]:
    for device in machine.devices:
        yield _device(device, machine.vllm_for_cpu)
    if not machine.devices:
        on_cores = "engines compute on cores: enough for trials with small models, too slow for large ones"
        yield Finding(
            "devices", "costs", f"none: {machine.no_devices}",
            on_cores if machine.vllm_for_cpu else "no engine of this build of vLLM starts",
            f"NVIDIA GPUs with their driver, and {INSTALL_FOR_GPUS}; in a container, docker run --gpus all",
        )  # fmt: skip


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


def _cores(machine: Machine) -> Finding:
    flags, cores = set(machine.cpu_flags), f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    if machine.cores < 2:
        return Finding(
            "cores",
            "costs",
            cores,
            "two engines share one core, and all their steps are slow",
            "more cores, or --both 1",
        )
    if flags and not flags & COMPUTE_WITH_BFLOAT16:
        return Finding(
            "cores", "costs", f"{cores}, no instructions for bfloat16",
            "engines compute in float32, and KV takes twice the memory",
            "nothing: --dtype bfloat16 would be many times as slow",
        )  # fmt: skip
    return Finding("cores", "ok", cores)


def _memory(machine: Machine) -> Finding:
    found = f"{_gib(machine.memory)} free"
    if machine.memory >= LEAST_MEMORY:
        return Finding("memory", "ok", found)
    costs = f"two engines with the built-in model need {_gib(LEAST_MEMORY)}"
    return Finding("memory", "costs", found, costs, "fewer engines: tercet up --prefill 0 --decode 0 --both 1")


def _driver(machine: Machine) -> Iterator[Finding]:
    needed = LEAST_DRIVER.get(_major(machine.cuda), 0)
    for driver in sorted({device.driver for device in machine.devices if device.driver}):
        if _major(driver) < needed:
            yield Finding(
                "driver", "costs", f"{driver}; PyTorch is built for CUDA {machine.cuda}",
                f"no engine starts, unless NVIDIA's cuda-compat for CUDA {machine.cuda} is installed",
                f"a driver from {needed} on, or a vLLM that is built for an older CUDA",
            )  # fmt: skip


def _major(version: str) -> int:
    major = version.partition(".")[0]
    return int(major) if major.isdigit() else 0


def _transports(machine: Machine) -> Iterator[Finding]:
    libraries = [name for name, there in machine.libraries.items() if there]
    yield _shared_memory_files(machine)
    if not machine.rdma:
        yield Finding("KV, between machines", "ok", f"no RDMA device: tcp, which needs no setup{_installed(libraries)}")
    for device in machine.rdma:
        yield _rdma_device(device, libraries)
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


def _shared_memory_files(machine: Machine) -> Finding:
    net = machine.namespaces.get("net", "unknown")
    if machine.sealed_files:
        found = f"memory files can be shared; network namespace {net}"
        return Finding("KV, one machine (host)", "ok", f"{found}; peers must run in the same one, as the same user")
    return Finding(
        "KV, one machine (host)", "broken", "memory files cannot be sealed (memfd_create)",
        "no engine starts: such files hold KV of CPU engines and every engine's send table",
        "a kernel from 3.17 on; in a sandbox such as gVisor, allow memfd_create with seals",
    )  # fmt: skip


def _rdma_device(device: InfinibandDevice, libraries: Sequence[str]) -> Finding:
    part = f"RDMA device {device.name}"
    if not device.active:
        costs, do = (
            "KV between machines uses tcp",
            "activate its port (ibstat), or ask the fabric's administrator",
        )
        return Finding(part, "costs", "no port is active", costs, do)
    if not device.usable:
        costs = "KV between machines uses tcp"
        return Finding(part, "costs", "this user may not use it", costs, "give the container /dev/infiniband")
    if not libraries:
        costs = "KV between machines uses tcp, at a fraction of the link's bandwidth"
        do = "run scripts/install-transport-extras"
        return Finding(part, "costs", "neither NIXL nor Mooncake is installed", costs, do)
    return Finding(part, "ok", f"active{_installed(libraries)}")


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
