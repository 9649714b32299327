"""``python -m scripts.silicon_profile``: a profile of simulated engines out of measured operator tables."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from benchmarks.command_line import run
from scripts.silicon_profile.silicon import SiliconQuery, import_profile

from tercet.cli.terminal import require_folder, write_file


def import_silicon(
    name: Annotated[str, typer.Option(help="The profile's name.")],
    model: Annotated[str, typer.Option(help="The model's name in the tables, such as `meta-llama/Meta-Llama-3.1-8B`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile's file.")],
    system: Annotated[str, typer.Option(help="The system's name in the tables.")] = "h100_sxm",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    python: Annotated[str, typer.Option(help="An interpreter that has `aiconfigurator-core`.")] = "python",
    backend: Annotated[str, typer.Option(help="Inference engine whose kernels were measured.")] = "vllm",
    gemm: Annotated[str | None, typer.Option(help="Precision of the matrix products, if not the model's own.")] = None,
    weight_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one weight.")] = 2,
    memory: Annotated[float, typer.Option(help="GiB of memory per GPU.")] = 80.0,
    bandwidth: Annotated[float, typer.Option(help="Bytes per second of one GPU's network port.")] = 50e9,
) -> None:
    """Fit a profile to the measured operator tables of aiconfigurator.

    Install the tables where they do no harm: `python -m venv aic && aic/bin/pip install aiconfigurator-core`.

    Example:
    - `python -m scripts.silicon_profile --python aic/bin/python --name mine --model Qwen/Qwen3-8B --tp 2 -o mine.json`
    """
    require_folder(output, "--output")
    query = SiliconQuery(
        name=name,
        model=model,
        system=system,
        tp_size=tp,
        python=python,
        backend=backend,
        gemm_quant_mode=gemm,
        weight_bytes=weight_bytes,
        memory_gib=memory,
        bytes_per_second=bandwidth,
    )
    flags = {"--tp": tp, "--backend": backend, "--gemm": gemm, "--weight-bytes": weight_bytes, "--memory": memory}
    given = [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]
    command = ["python", "-m", "scripts.silicon_profile", "--name", name, "--model", model, "--system", system, *given]
    found = import_profile(query, shlex.join(command))
    write_file(output, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", "--output")
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.provenance.fit_error.items())
    typer.echo(f"{output}: mean error of the fit: {errors}")


if __name__ == "__main__":
    run(import_silicon, "scripts.silicon_profile")
