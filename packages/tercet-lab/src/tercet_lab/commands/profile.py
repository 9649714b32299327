"""``tercet bench profile``: list, print and measure the step-time profiles of simulated engines."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from tercet.cli.flag_records import flags_as_records, require_defaults
from tercet.cli.given_names import given_as
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.protocol import BadRequest
from tercet.settings import SECRET_VARIABLE
from tercet.settings.engine_addresses import engine_address
from tercet.settings.extras import import_extra
from tercet.wire.client import HttpEngine
from tercet_lab.bench.profiles.step_measurement import Measured, MeasurementPlan, Meter, profile_from
from tercet_lab.sim import Profile, StepModel, load_profile, shipped_profiles
from tercet_lab.sim.step_times import Transfer, pairs_of

HEADINGS = ["name", "device", "KV tokens", "prefill 512", "prefill 3000", "decode 1", "decode 64", "fit error"]
CONTEXT = 1024
DEVICE = platform.machine()


@dataclass(frozen=True)
class MeasurementFlags:
    """An engine to measure, how it is measured, and the file of its profile."""

    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="URL of an idle engine to measure. With a second one, transfers are measured and, on the same host, "
            "how much longer steps take while both compute.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the new profile; required with --engine.")
    ] = None
    router: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a router before the engines; the time that it adds to a request is measured."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="Name of the device in the profile.")] = DEVICE
    max_step_tokens: Annotated[int, typer.Option(help="Value of the engine's `--max-num-batched-tokens` (tokens).")] = (
        512
    )
    repeats: Annotated[int, typer.Option(help="Number of measurements of each step; the median is used.")] = 3
    bandwidth: Annotated[float, typer.Option(help="Bandwidth between engines, if not measured (bytes per second).")] = (
        1e9
    )
    latency: Annotated[
        float, typer.Option(help="Time from the last byte to the answer, if not measured (seconds).")
    ] = 0.0005

    @property
    def engines(self) -> list[str]:
        """The URL of the engine to measure, and that of a second engine if one is given."""
        return self.engine or []

    def plan(self, name: str) -> MeasurementPlan:
        """Return the plan of the measurement of a profile ``name``; raise :class:`~tercet.protocol.BadRequest`."""
        return MeasurementPlan(
            name=name,
            device=self.device,
            max_step_tokens=self.max_step_tokens,
            same_host=len({urlsplit(url).hostname for url in self.engines}) < len(self.engines),
            router=self.router.rstrip("/") if self.router else None,
            repeats=self.repeats,
            seed=time.time_ns(),
        )

    def command(self) -> str:
        """Return the command line that repeats the measurement."""
        engines = [part for url in self.engines for part in ("--engine", url)]
        engines += ["--router", self.router] if self.router else []
        sizes = ["--max-step-tokens", str(self.max_step_tokens), "--repeats", str(self.repeats)]
        return shlex.join(["tercet", "bench", "profile", *engines, *sizes])


@flags_as_records
def profile(
    name: Annotated[
        str | None,
        typer.Argument(help="Built-in profile or JSON file to print; with --engine, the name of the new profile."),
    ] = None,
    *,
    measurement: MeasurementFlags,
) -> None:
    """List the step-time profiles of simulated engines, print one, or measure one on a running engine.

    The list has step times in milliseconds; decode steps have 1024 tokens of context. A measurement takes some minutes.

    Examples:
    - `tercet bench profile`
    - `tercet bench profile llama-3.1-8b-h100-tp1`
    - `tercet bench profile --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 -o mine.json`
    - `tercet sim --profile mine.json --option max_num_batched_tokens=512 --fleet both=2@here --request-rate 1`
    """
    if measurement.engine:
        if measurement.output is None:
            raise BadRequest("--output: is required; give a file for the profile", "--output")
        _measure_and_write(name or measurement.output.stem, measurement, measurement.output)
        return
    require_defaults(measurement, "--engine", *(each.name for each in fields(measurement)))
    if name is None:
        show_table("profiles", HEADINGS, [_row(load_profile(each)) for each in shipped_profiles()])
    else:
        with given_as({"profile": "NAME"}):
            found = load_profile(name)
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())


@given_as({"engine": "--engine", "repeats": "--repeats", "max_step_tokens": "--max-step-tokens"})
def _measure_and_write(name: str, measurement: MeasurementFlags, output: Path) -> None:
    """Measure a running engine's steps, and fit a profile to them."""
    require_folder(output, "--output")
    import_extra("scipy.optimize", "tercet bench profile --engine")
    if len(measurement.engines) > 2:
        raise BadRequest("--engine: at most two are allowed: the measured engine and a receiver", "--engine")
    plan = measurement.plan(name)
    link = Transfer(bytes_per_second=measurement.bandwidth, latency=measurement.latency)
    began = time.monotonic()
    measured = asyncio.run(_measure(measurement.engines, plan))
    found = profile_from(measured, plan, measurement.command(), link)
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
    """Write a profile, and print the mean error of its fit."""
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
