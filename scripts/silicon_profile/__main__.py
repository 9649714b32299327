"""``python -m scripts.silicon_profile``: a profile for simulated engines from measured operator tables."""

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
    name: Annotated[str, typer.Option(help="Name of the profile.")],
    model: Annotated[
        str, typer.Option(help="Name of the model in the tables, such as `meta-llama/Meta-Llama-3.1-8B`.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the profile.")],
    system: Annotated[str, typer.Option(help="Name of the system in the tables.")] = "h100_sxm",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    python: Annotated[str, typer.Option(help="Python interpreter with `aiconfigurator-core`.")] = "python",
    backend: Annotated[str, typer.Option(help="Inference engine with the measured kernels.")] = "vllm",
    gemm: Annotated[str | None, typer.Option(help="Precision of matrix products, if not the model's.")] = None,
    weight_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one weight.")] = 2,
    memory: Annotated[float, typer.Option(help="Memory per GPU in GiB.")] = 80.0,
    bandwidth: Annotated[float, typer.Option(help="Bandwidth of one GPU's network port in bytes per second.")] = 50e9,
) -> None:
    """Fit a profile to the measured operator tables of aiconfigurator.

    Install the tables in a separate environment: `python -m venv aic && aic/bin/pip install aiconfigurator-core`.

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
