"""``tercet up --detach`` and ``tercet down``: start and stop a fleet in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec
import typer

from tercet.aio.files import write_whole
from tercet.cli.setting_flags import PARTS, flags_as_records, flags_of, given_as
from tercet.cli.terminal import announce
from tercet.cli.which_fleet import WhichFleet, but_at, the_one
from tercet.cluster.detached_fleets import (
    DetachedFleet,
    announced,
    detached_fleets,
    log_directory,
    own_start,
    running_fleets,
)
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest, EngineError
from tercet.settings import declared, encode_settings, settings_from_parent

if TYPE_CHECKING:
    from tercet.cluster.running_fleet import StartedFleet

POLL_INTERVAL_S = 0.2
# Addition to the time of a start for a first conversion of the model.
CONVERSION_SECONDS = 300.0
# The exit code of a fleet whose settings are refused.
REFUSED = 2
COMMAND = "from tercet.cli.detached import main; main()"


def detach(config: UpConfig) -> DetachedFleet:
    """Start a fleet in the background, wait until it is ready, print how to stop it, and return it.

    Raises :class:`~tercet.protocol.BadRequest` if the fleet refuses its settings, and another
    :class:`~tercet.protocol.TercetError` if it does not become ready. Ctrl-C during the wait stops the fleet.
    """
    log_dir = log_directory(config.log_dir)
    log = log_dir / "up.log"
    # A private file holds the settings, which may include keys. A new session: no terminal ends the process.
    file = log_dir / "up.json"
    settings = {**encode_settings(config), "detach": False, "log-dir": str(log_dir)}
    write_whole(file, msgspec.json.encode(settings))
    held = {each.env for each in declared(UpConfig)}  # the file has the values of these variables
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(file)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in held},
        )  # fmt: skip
    try:
        fleet = _until_announced(process, log)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    announce(f"\nready at {fleet.url}, in the background; log: {log}")
    announce(f"  tercet status --port {fleet.port}\n  tercet down --port {fleet.port}")
    return fleet


def _until_announced(process: subprocess.Popen[bytes], log: Path) -> DetachedFleet:
    """Print the fleet's log until it is ready, and return its record."""
    from tercet.cluster.running_fleet import READY_SECONDS

    seconds = READY_SECONDS + CONVERSION_SECONDS
    deadline = time.monotonic() + seconds
    with log.open("rb") as said:
        while time.monotonic() < deadline:
            # Before the log is read: what an ended process wrote last is then still printed.
            ended = process.poll() is not None
            while line := said.readline():
                announce(line.decode(errors="replace").rstrip("\n"))
            if ended:
                error = BadRequest if process.returncode == REFUSED else EngineError
                raise error(f"the fleet did not start; log: {log}")
            for fleet in detached_fleets():
                if fleet.pid == process.pid:
                    return fleet
            time.sleep(POLL_INTERVAL_S)
    raise EngineError(f"the fleet was not ready within {seconds:.0f} s; log: {log}")


def main() -> None:
    """Run the fleet in the background process until a signal stops it."""
    from tercet.cli.app import exit_code_of, exit_on_signal
    from tercet.cli.up import run_fleet

    signal.signal(signal.SIGTERM, exit_on_signal)

    def serve() -> None:
        config = settings_from_parent(UpConfig, Path(sys.argv[1]))
        with given_as({**PARTS, **flags_of(UpConfig)}):
            run_fleet(config, lambda fleet: until_broken(config, fleet, detached=True))

    sys.exit(exit_code_of(serve))


async def until_broken(config: UpConfig, fleet: StartedFleet, detached: bool) -> None:
    """Wait until the fleet breaks; ``tercet scale`` finds it until then, and ``tercet down`` if it is ``detached``."""
    from tercet.cluster.scaling.scaler import Scaler, control_socket

    def on_event(name: str, state: str) -> None:
        announce(f"{name}: {state}")

    port, log_dir, stop_seconds = urlsplit(fleet.url).port or config.port, str(fleet.log_dir), stop_seconds_of(config)
    async with Scaler(fleet.provisioner, on_event) as scaler, control_socket(scaler) as control:
        with announced(DetachedFleet(own_start(), port, fleet.url, log_dir, stop_seconds, str(control), detached)):
            await fleet.until_broken(on_event)


def stop_seconds_of(config: UpConfig) -> float:
    """Return the longest time, in seconds, that stopping the fleet takes."""
    from tercet.cluster.child_process import GRACE_SECONDS
    from tercet.cluster.running_fleet import STOP_ON_RAY_SECONDS

    on_ray = STOP_ON_RAY_SECONDS if config.on is not None else 0.0
    return config.shutdown_timeout_s + 3 * GRACE_SECONDS + on_ray


@flags_as_records
def down(
    which: WhichFleet, every: Annotated[bool, typer.Option("--all", help="Stop all background fleets.")] = False
) -> None:
    """Stop a fleet that `tercet up --detach` started, after its running requests end.

    Ctrl-C stops the fleet at once.
    """
    for fleet in _chosen(which, every):
        stop_detached(fleet)


def _chosen(which: WhichFleet, every: bool) -> list[DetachedFleet]:
    if every and which.is_given:
        raise BadRequest(f"--all: cannot be combined with --{'url' if which.port is None else 'port'}", "--all")
    running = running_fleets()
    # A fleet in a terminal is stopped there: its user sees what happens to it.
    detached = [fleet for fleet in running if fleet.detached]
    chosen = detached if every else which.among(detached)
    if chosen:
        return chosen if every else [the_one(chosen, other=", or --all")]
    if attached := which.among(running):
        raise EngineError(f"the fleet at {attached[0].url} is not in the background: Ctrl-C in its terminal stops it")
    raise EngineError(f"no fleet of `tercet up --detach` runs here{which.in_words()}{but_at(detached)}")


def stop_detached(fleet: DetachedFleet) -> None:
    """Stop a fleet; raise :class:`~tercet.protocol.EngineError` if it runs longer than its ``stop_seconds``."""
    announce(f"stopping {fleet.url}")
    _signal(fleet)
    deadline = time.monotonic() + fleet.stop_seconds
    # It is not a child of this process, so there is nothing to wait on.
    while fleet.runs:
        if time.monotonic() > deadline:
            raise EngineError(f"{fleet.url} did not stop within {fleet.stop_seconds:.0f} s; logs: {fleet.log_dir}")
        try:
            time.sleep(POLL_INTERVAL_S)
        except KeyboardInterrupt:
            announce("stopping at once: running requests end with an error")
            _signal(fleet)
    detached_fleets()  # removes the record of a fleet that was killed
    announce(f"stopped {fleet.url}")


def _signal(fleet: DetachedFleet) -> None:
    if fleet.runs:
        os.kill(fleet.pid, signal.SIGTERM)
