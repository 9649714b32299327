"""``tercet profile``: step-time profiles of simulated engines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tercet.bench.profiles.silicon import SiliconQuery, import_profile
from tercet.cli.sim import require_folder, show
from tercet.protocol import BadRequest
from tercet.sim import Profile, StepModel, load_profile, shipped_profiles
from tercet.sim.profile import pairs_of

app = typer.Typer(rich_markup_mode="markdown", help="Step-time profiles of simulated engines.")

Output = Annotated[Path, typer.Option("--output", "-o", help="The profile's file.")]
HEADINGS = ["name", "device", "KV tokens", "prefill 512", "prefill 3000", "decode 1", "decode 64", "fit error"]
CONTEXT = 1024


@app.command("list")
def list_profiles() -> None:
    """Show the shipped profiles, with steps in milliseconds (decodes at 1024 tokens of context)."""
    show("profiles", HEADINGS, [_row(load_profile(name)) for name in shipped_profiles()])


@app.command("show")
def show_profile(name: Annotated[str, typer.Argument(help="A shipped profile, or a JSON file.")]) -> None:
    """Print a profile as JSON."""
    typer.echo(msgspec.json.format(msgspec.json.encode(load_profile(name))).decode())


@app.command("import")
def import_silicon(
    name: Annotated[str, typer.Option(help="The profile's name.")],
    model: Annotated[str, typer.Option(help="The model's name in the tables, such as `meta-llama/Meta-Llama-3.1-8B`.")],
    output: Output,
    system: Annotated[str, typer.Option(help="The system's name in the tables.")] = "h100_sxm",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    python: Annotated[str, typer.Option(help="An interpreter that has `aiconfigurator-core`.")] = "python",
    backend: Annotated[str, typer.Option(help="Whose kernels were measured.")] = "vllm",
    gemm: Annotated[str | None, typer.Option(help="Precision of the matrix products, if not the model's own.")] = None,
    weight_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one weight.")] = 2,
    memory: Annotated[float, typer.Option(help="GiB of memory per GPU.")] = 80.0,
    bandwidth: Annotated[float, typer.Option(help="Bytes per second of one GPU's network port.")] = 50e9,
) -> None:
    """Fit a profile to the measured operator tables of aiconfigurator.

    Install the tables where they do no harm: `python -m venv aic && aic/bin/pip install aiconfigurator-core`.

    Example:
    - `tercet profile import --python aic/bin/python --name mine --model Qwen/Qwen3-8B --tp 2 -o mine.json`
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
    command = ["tercet", "profile", "import", "--name", name, "--model", model, "--system", system, *given]
    profile = import_profile(query, shlex.join(command))
    write(output, profile)
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in profile.provenance.fit_error.items())
    typer.echo(f"{output}: mean error of the fit: {errors}")


def write(output: Path, profile: Profile) -> None:
    """Write a profile; raises :class:`~tercet.protocol.BadRequest` if that is impossible."""
    try:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise BadRequest(f"--output: {output} cannot be written: {error.strerror}", "--output") from error


def _row(profile: Profile) -> list[str]:
    model = StepModel(profile.steps)
    prefills = [model.step(tokens, pairs_of(0, tokens), 0, 0) for tokens in (512, 3000)]
    decodes = [model.step(0, 0, batch, batch * CONTEXT) for batch in (1, 64)]
    errors = profile.provenance.fit_error.values()
    worst = f"{max(errors):.1%}" if errors else "-"
    times = [f"{seconds * 1000:.1f}" for seconds in (*prefills, *decodes)]
    tokens = profile.total_blocks * profile.block_size
    return [profile.name, profile.device, f"{tokens:,}", *times, worst]
