"""What engines compute in where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cluster import devices
from tercet.cluster.devices import cpu_flags, default_dtype
from tercet.cluster.engine_command import EngineSpec, engine_argv

OLD = "processor\t: 0\nflags\t\t: fpu sse2 avx avx2 fma\nbugs\t\t: x\n\nprocessor\t: 1\nflags\t\t: avx512f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        (OLD, "float32"),
        ("flags\t: avx2 avx512f", "bfloat16"),
        ("flags\t: avx2 avx512f avx512_bf16 amx_bf16", "bfloat16"),
        ("flags\t: avx2 avx_ne_convert", "bfloat16"),
        ("Features\t: asimd", "float32"),
        ("Features\t: asimd bf16", "bfloat16"),
        ("processor\t: 0\n", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_by_what_the_cpu_can_do(
    cpuinfo: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(devices, "CPUINFO", file)
    assert default_dtype(cpu=True) == wanted
    assert default_dtype(cpu=False) is None


def test_the_first_processor_speaks_for_all() -> None:
    assert cpu_flags(OLD) == {"fpu", "sse2", "avx", "avx2", "fma"}


@pytest.mark.parametrize(("said", "wanted"), [(None, "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")])
def test_who_says_one_gets_it(said: str | None, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(OLD)
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    spec = EngineSpec(name="p", model="m", served_model_name="m", host="h", port=1, dtype=said, cores=(0,))
    argv = engine_argv(spec)
    assert argv[argv.index("--dtype") + 1] == wanted
