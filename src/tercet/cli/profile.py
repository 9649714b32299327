"""``tercet profile``: step-time profiles of simulated engines."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from tercet.cli.given_names import given_as
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.lab.bench.profiles.silicon import SiliconQuery, import_profile
from tercet.lab.bench.profiles.step_measurement import Measured, MeasurementPlan, Meter, profile_from
from tercet.lab.sim import Profile, StepModel, load_profile, shipped_profiles
from tercet.lab.sim.step_times import Transfer, pairs_of
from tercet.protocol import BadRequest
from tercet.settings import SECRET_VARIABLE
from tercet.settings.extras import import_extra
from tercet.settings.router_config import engine_address
from tercet.wire.client import HttpEngine

profile = typer.Typer(name="profile", rich_markup_mode="markdown", help="Step-time profiles of simulated engines.")

Output = Annotated[Path, typer.Option("--output", "-o", help="The profile's file.")]
HEADINGS = ["name", "device", "KV tokens", "prefill 512", "prefill 3000", "decode 1", "decode 64", "fit error"]
CONTEXT = 1024


@profile.command("list")
def list_profiles() -> None:
    """Show the shipped profiles, with steps in milliseconds (decodes at 1024 tokens of context)."""
    show_table("profiles", HEADINGS, [_row(load_profile(name)) for name in shipped_profiles()])


@profile.command("show")
def show_profile(name: Annotated[str, typer.Argument(help="A shipped profile, or a JSON file.")]) -> None:
    """Print a profile as JSON."""
    with given_as({"profile": "NAME"}):
        found = load_profile(name)
    typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


@profile.command("import")
def import_silicon(
    name: Annotated[str, typer.Option(help="The profile's name.")],
    model: Annotated[str, typer.Option(help="The model's name in the tables, such as `meta-llama/Meta-Llama-3.1-8B`.")],
    output: Output,
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
    _finish(output, import_profile(query, shlex.join(command)), "")


@profile.command("measure")
@given_as({"engine": "--engine", "repeats": "--repeats", "max_step_tokens": "--max-step-tokens"})
def measure_engine(
    engine: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="An idle engine's server; a second one lets transfers be measured and, on the same host, how much "
            "longer steps take while both compute.",
        ),
    ],
    output: Output,
    router: Annotated[
        str | None, typer.Option(metavar="URL", help="A router before them: what it adds to a request is measured.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The profile's name.", show_default="the file's")] = None,
    device: Annotated[str, typer.Option(help="Name of the device, for the profile.")] = platform.machine(),
    max_step_tokens: Annotated[int, typer.Option(help="The engine's `--max-num-batched-tokens`.")] = 512,
    repeats: Annotated[int, typer.Option(help="Measurements of each step; the median counts.")] = 3,
    bandwidth: Annotated[float, typer.Option(help="Bytes per second between engines, if not measured.")] = 1e9,
    latency: Annotated[float, typer.Option(help="Seconds from last byte to answer, if not measured.")] = 0.0005,
) -> None:
    """Measure a running engine's steps, some minutes, and fit a profile to them.

    Example:
    - `tercet profile measure --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 -o mine.json`
    - `tercet sim --profile mine.json --option max_num_batched_tokens=512 --fleet both=2@here --request-rate 1`
    """
    require_folder(output, "--output")
    import_extra("scipy.optimize", "tercet profile measure")
    if len(engine) > 2:
        raise BadRequest("--engine: one is measured, and a second one receives; there is no use for more", "--engine")
    plan = MeasurementPlan(
        name=name or output.stem,
        device=device,
        max_step_tokens=max_step_tokens,
        same_host=len({urlsplit(url).hostname for url in engine}) < len(engine),
        router=router.rstrip("/") if router else None,
        repeats=repeats,
        seed=time.time_ns(),
    )
    began = time.monotonic()
    measured = asyncio.run(_measure(engine, plan))
    engines = [part for url in engine for part in ("--engine", url)]
    engines += ["--router", router] if router else []
    sizes = ["--max-step-tokens", str(max_step_tokens), "--repeats", str(repeats)]
    command = shlex.join(["tercet", "profile", "measure", *engines, *sizes])
    found = profile_from(measured, plan, command, Transfer(bytes_per_second=bandwidth, latency=latency))
    _finish(output, found, f"in {time.monotonic() - began:.0f} s; ")


async def _measure(urls: list[str], plan: MeasurementPlan) -> Measured:
    async with AsyncExitStack() as stack:
        addresses = [engine_address(url, index) for index, url in enumerate(urls)]
        engines = [
            await stack.enter_async_context(HttpEngine(each.url, each.url, secret=os.environ.get(SECRET_VARIABLE, "")))
            for each in addresses
        ]
        receiver = engines[1] if len(engines) > 1 else None
        return await Meter(engines[0], receiver, plan, note).measure()


def _finish(output: Path, found: Profile, how: str) -> None:
    """Write a profile, and say how well it fits."""
    write_file(output, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n", "--output")
    errors = ", ".join(f"{kind} {error:.1%}" for kind, error in found.provenance.fit_error.items())
    typer.echo(f"{output}: {how}mean error of the fit: {errors}")


def _row(found: Profile) -> list[str]:
    model = StepModel(found.steps)
    prefills = [model.step(tokens, pairs_of(0, tokens), 0, 0) for tokens in (512, 3000)]
    decodes = [model.step(0, 0, batch, batch * CONTEXT) for batch in (1, 64)]
    errors = found.provenance.fit_error.values()
    worst = f"{max(errors):.1%}" if errors else "-"
    times = [f"{seconds * 1000:.1f}" for seconds in (*prefills, *decodes)]
    tokens = found.total_blocks * found.block_size
    return [found.name, found.device, f"{tokens:,}", *times, worst]
