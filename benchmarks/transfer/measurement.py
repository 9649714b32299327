"""The measurement of every way in every case, in rounds of random order, with results as a table and a file."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.transfer.cases import KIB, MIB, Case, Result, Table
from benchmarks.transfer.interference import Interference
from benchmarks.transfer.libraries import LIBRARIES
from benchmarks.transfer.receiving_process import ReceivingProcess
from benchmarks.transfer.ways import CheckedSockets, ChunkedSockets, Direct, Memcpy, OurTransport, PlainSockets, Way

from tercet import __version__
from tercet.protocol import TercetError
from tercet.transport import KVRegion, TransportSettings
from tercet_lab.bench.results import machine, three_digits

SOCKET_STREAMS, CHUNK_STREAMS, CHECKED_STREAMS = (1, 2, 4), (2, 4), (1, 2, 4)
KINDS = ("socket", "checked")  # of plain sockets, to compare with
BACKENDS = ("host", "tcp", "nixl", "mooncake")
# Time for which idle processes are observed; a tick of the kernel's clock is 10 ms.
IDLE_SECONDS = 5.0

# A round moves half of the blocks. The first read of a page of another process's memory maps the page; an engine has
# done this for all pages after its first minutes.
WARM_UP = 4

Progress = Callable[[str], None]
Maker = Callable[[], Way]


def measure(cases: Sequence[Case], backends: Sequence[str], rounds: int, streams: int, progress: Progress) -> Table:
    """Measure each way in each case ``rounds`` times, after :data:`WARM_UP` rounds. Return the results."""
    table, shuffle = Table(), random.Random(0)
    for case in cases:
        progress(f"{case.chunk_bytes / 1024:g} KiB chunks, {case.total_bytes / 1024**2:g} MiB")
        source = case.region()
        try:
            with ReceivingProcess(case) as peer, _ways(case, source, peer, backends, streams, table) as ways:
                for number in range(-WARM_UP, rounds):
                    for way in shuffle.sample(ways, len(ways)):
                        _one(way, case, table, ways, warm=number < 0)
        finally:
            source.close()
    return table


def _one(way: Way, case: Case, table: Table, ways: list[Way], *, warm: bool) -> None:
    try:
        seconds = way.move()
    except TercetError as error:
        table.fail(way.name, case, error.message)
        ways.remove(way)
        return
    if not warm:
        table.add(way.name, case, seconds)


@contextmanager
def _ways(
    case: Case, source: KVRegion, peer: ReceivingProcess, backends: Sequence[str], streams: int, table: Table
) -> Generator[list[Way]]:
    makers: list[tuple[str, Maker]] = [("memcpy", lambda: Memcpy(case, source))]
    makers += [
        (f"socket x{number}", lambda number=number: PlainSockets(case, source, peer, number))
        for number in SOCKET_STREAMS
    ]
    makers += [
        (f"chunks x{number}", lambda number=number: ChunkedSockets(case, source, peer, number))
        for number in CHUNK_STREAMS
        if number <= case.slots
    ]
    makers += [
        (f"checked x{number}", lambda number=number: CheckedSockets(case, source, peer, number))
        for number in CHECKED_STREAMS
        if number <= case.slots
    ]
    for name in backends:
        settings = TransportSettings(name, streams=streams)
        makers.append((name, lambda name=name, settings=settings: OurTransport(name, case, source, peer, settings)))
    makers += [
        (f"{name} direct", lambda name=name: Direct(name, case, source, peer)) for name in backends if name in LIBRARIES
    ]
    table.order = [name for name, _ in makers]
    ways: list[Way] = []
    with ExitStack() as stack:
        for name, make in makers:
            try:
                way = make()
            except TercetError as error:
                table.fail(name, case, error.message)
                continue
            stack.callback(way.close)
            ways.append(way)
        yield ways


def idle_cpu(backends: Sequence[str], streams: int, progress: Progress) -> dict[str, float | str]:
    """Return the number of cores that a connected, idle pair of ranks uses, by backend; a text is a failure."""
    case = Case(96 * 1024, 4 * 1024 * 1024)
    found: dict[str, float | str] = {}
    for name in backends:
        progress(f"watching an idle pair of ranks over {name} for {IDLE_SECONDS:g} s")
        source = case.region()
        try:
            with ReceivingProcess(case) as peer:
                found[name] = _idle(
                    OurTransport(name, case, source, peer, TransportSettings(name, streams=streams)), peer
                )
        except TercetError as error:
            found[name] = error.message
        finally:
            source.close()
    return found


def _idle(way: OurTransport, peer: ReceivingProcess) -> float:
    try:
        way.move()
        began, here, there = time.perf_counter(), time.process_time(), peer.call("cpu_seconds")
        time.sleep(IDLE_SECONDS)
        used = time.process_time() - here + peer.call("cpu_seconds") - there
        return used / (time.perf_counter() - began)
    finally:
        way.close()


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of one run, with its machine. Times are in seconds, ``idle_cores`` in cores."""

    version: str
    machine: dict[str, Any]
    results: list[Result]
    idle_cores: dict[str, float | str]
    interference: dict[str, Interference | str] = {}

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def report(table: Table, idle: dict[str, float | str], interference: dict[str, Interference | str]) -> Report:
    """Return the report of a run."""
    results = list(table.results.values())
    return Report(__version__, machine(), results, idle, interference)


def rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return the head of the table, and a line for each case with the rates of all ways."""
    head = ["chunk, KiB", "total, MiB", *table.ways]
    return head, [[*_label(case), *(_cell(table, way, case) for way in table.ways)] for case in table.cases]


def ratios(table: Table, way: str = "tcp") -> tuple[list[str], list[list[str]]]:
    """Return a table's head and lines: the rate of ``way`` over that of the best plain and the best checked socket.

    The best is that of the best median. Each round gives a ratio: the cells have the median and the quartiles.
    """
    head = ["chunk, KiB", "total, MiB", *(f"{way} / best {kind}" for kind in KINDS)]
    return head, [
        [*_label(case), *(_ratio(table, way, kind, case) for kind in KINDS)]
        for case in table.cases
        if table.rate(way, case) is not None
    ]


def _ratio(table: Table, way: str, kind: str, case: Case) -> str:
    rivals = [other for other in table.ways if other.startswith(f"{kind} x") and table.rate(other, case) is not None]
    if not rivals:
        return "-"
    best = max(rivals, key=lambda other: table.rate(other, case) or 0.0)
    ours, theirs = table.results[way, case].seconds, table.results[best, case].seconds
    found = [there / here for here, there in zip(ours, theirs, strict=False)]
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f}, {best})"


def failures(table: Table) -> dict[str, str]:
    """Return the reasons why ways could not be measured, by way."""
    return {way: found.error for (way, _), found in table.results.items() if found.error is not None}


def _label(case: Case) -> tuple[str, str]:
    return f"{case.chunk_bytes / KIB:g}", f"{case.total_bytes / MIB:g}"


def _cell(table: Table, way: str, case: Case) -> str:
    rate = table.rate(way, case)
    return "-" if rate is None else three_digits(rate)
