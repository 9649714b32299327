"""``tercet up`` as a Ray job: Ray ends a job within seconds, but the fleet stops in its own time.

Ray sends SIGTERM to the job's command and all its descendants at the same time, and SIGKILL three seconds later. A
router stops at once at a second SIGTERM, and engines on Ray are not descendants of the job: answers would be cut, and
engines would continue to run. The fleet therefore runs in a process that is not a descendant of the job's command. That
process gets one SIGTERM when the command gets one, or ends for any reason.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tercet.cli.detached import stop_seconds_of
from tercet.cli.setting_flags import PARTS, flags_of, given_as
from tercet.cluster.up_config import UpConfig
from tercet.settings import encode_settings, settings_from_parent
from tercet_ray.fleet_keeper import DetachedProcess

COMMAND = "from tercet_ray.ray_job import main; main()"
KILLED = 128 + signal.SIGKILL


def run_as_a_job(config: UpConfig) -> int:
    """Run the fleet until it ends, or Ray ends the job; return its exit code. It writes to this process's output.

    Raises :class:`~tercet.protocol.EngineError` if the fleet's process cannot be started.
    """
    # Settings may hold keys. They are in memory files, so a killed process leaves no key on disk.
    settings, code = os.memfd_create("settings"), os.memfd_create("exit code")
    with open(settings, "wb", closefd=False) as out:
        out.write(msgspec.json.encode(encode_settings(config)))
    argv = [sys.executable, "-c", COMMAND, str(_opened(settings)), str(_opened(code))]
    fleet = DetachedProcess(argv, {}, _opened(1), grace=stop_seconds_of(config))
    fleet.start()
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda _number, _frame: fleet.let_go())
        while not fleet.ended_within(3600.0):
            pass
        return int(_opened(code).read_text() or KILLED)
    finally:
        fleet.close()


def _opened(descriptor: int) -> Path:
    """Return a path by which another process opens an open file of this process."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def main() -> None:
    """Run the fleet's process: ``-c COMMAND SETTINGS CODE``."""
    from tercet.cli.app import exit_code_of, exit_on_signal
    from tercet.cli.up import run_fleet, stay

    signal.signal(signal.SIGTERM, exit_on_signal)
    settings, code = map(Path, sys.argv[1:])
    config = settings_from_parent(UpConfig, settings)

    def serve() -> None:
        with given_as({**PARTS, **flags_of(UpConfig)}):
            run_fleet(config, lambda fleet: stay(config, fleet))

    try:
        sys.exit(exit_code_of(serve))
    except SystemExit as end:
        with suppress(OSError):  # the job's command was killed
            code.write_text(str(end.code))
        raise
