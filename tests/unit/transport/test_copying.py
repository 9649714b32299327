"""How a process that copies KV is started."""

import os
import subprocess
import sys

import pytest

from tercet.transport.agent.agent import COPY_PAST_THE_CACHES, TUNABLES, past_the_caches


def _tunables(environment: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=") for part in environment[TUNABLES].split(":"))


def test_the_c_library_is_told_when_to_copy_past_the_caches() -> None:
    found = past_the_caches({"PATH": "/bin"})
    assert found["PATH"] == "/bin"
    assert _tunables(found) == COPY_PAST_THE_CACHES


def test_tunables_of_the_user_stay() -> None:
    theirs = "glibc.malloc.arena_max=2:glibc.cpu.x86_non_temporal_threshold=0x100000"
    found = _tunables(past_the_caches({TUNABLES: theirs}))
    assert found["glibc.malloc.arena_max"] == "2"
    assert found["glibc.cpu.x86_non_temporal_threshold"] == "0x100000"
    assert found["glibc.cpu.x86_rep_movsb_threshold"] == COPY_PAST_THE_CACHES["glibc.cpu.x86_rep_movsb_threshold"]


@pytest.mark.processes
def test_a_process_started_so_copies_every_byte() -> None:
    """Sizes around the threshold, and places that are not aligned: an error would be silent corruption of KV."""
    program = """
import random
source = random.Random(1).randbytes(1 << 21)
for size in (1, 0x4000, 0x47ff, 0x4800, 0x4801, 98304, 1 << 20):
    for there, here in ((0, 0), (64, 64), (0, 64), (3, 1029), (4096, 1)):
        target = bytearray(1 << 21)
        memoryview(target)[here : here + size] = memoryview(source)[there : there + size]
        assert target[here : here + size] == source[there : there + size], (size, there, here)
        assert not any(target[:here]) and not any(target[here + size :]), (size, there, here)
"""
    subprocess.run([sys.executable, "-c", program], env=past_the_caches(os.environ), check=True, timeout=120)
