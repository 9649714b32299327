"""The process that follows a fleet on Ray: it runs the fleet's keeper, and writes the roster that the router follows.

``python -m tercet_ray.follower FLEET ROSTER``. Ray ends this process when Ray's head does not answer for a
long time. The process is then restarted; in the meantime the roster, and so the router's list of engines, stays
unchanged. ``... follower FLEET`` without a roster ends the fleet.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tercet.aio.files import read_whole, write_whole
from tercet.fleet.discovery.roster import MOST_BYTES, RosterEntry, write_roster
from tercet.logs import log_to_stderr
from tercet.protocol import BadRequest, TercetError
from tercet_ray.fleet_keeper import FleetKeeper
from tercet_ray.ray_access import connect
from tercet_ray.reconcile import merged
from tercet_ray.wanted import NAMESPACE, WantedFleet

logger = logging.getLogger("tercet.ray")
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 10.0
STOP_SECONDS = 90.0


def keeper_of(ray: Any, wanted: WantedFleet) -> Any:
    """Return the fleet's keeper; start one if there is none.

    Raises :class:`~tercet.protocol.BadRequest` if a fleet with this name and other settings runs.
    """
    content = msgspec.json.encode(wanted)
    options: dict[str, Any] = {
        "name": wanted.keeper, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True,
        "max_restarts": -1, "max_concurrency": 8, "num_cpus": 0,
    }  # fmt: skip
    keeper = ray.remote(FleetKeeper).options(**options).remote(content)
    kept = once_it_runs(ray, keeper.wanted.remote())
    if not _is_same_fleet(kept, content):
        raise BadRequest(
            f"--on: a fleet called {wanted.name} runs on {wanted.address} with other settings; stop it with `tercet "
            "down`, or choose another --fleet-name",
            "on",
        )
    return keeper


def once_it_runs(ray: Any, answer: Any) -> bytes:
    """Wait without a limit for a keeper's first answer: Ray may first have to create an environment for the keeper."""
    is_told = False
    while True:
        try:
            return ray.get(answer, timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if not is_told:
                logger.warning("the fleet on Ray: its keeper does not run yet; waiting for it")
            is_told = True


def _is_same_fleet(kept: bytes, wanted: bytes) -> bool:
    """True if both describe the same fleet; versions of one fleet may differ in the number of engines."""
    one, other = (msgspec.json.decode(content, type=WantedFleet) for content in (kept, wanted))
    if one.version == other.version:
        return _comparable(one) == _comparable(other)
    return _without_names(one) == _without_names(other)


def _comparable(fleet: WantedFleet) -> WantedFleet:
    """Return the fleet without the fields that differ at each start of the command."""
    engines = tuple(msgspec.structs.replace(each, log_dir=None) for each in fleet.engines)
    return msgspec.structs.replace(fleet, address="", engines=engines)


def _without_names(fleet: WantedFleet) -> WantedFleet:
    """Return the comparable fleet with one nameless engine, since all engines have the same settings."""
    like = _comparable(fleet).engines[0]
    one = msgspec.structs.replace(like, spec=msgspec.structs.replace(like.spec, name=""), role="both")
    return msgspec.structs.replace(fleet, address="", engines=(one,), version=0)


def _agreed(ray: Any, keeper: Any, file: Path) -> WantedFleet:
    """Return the newer of the file's and the keeper's wanted fleet, and write it to the other one."""
    ours = read_whole(file)
    wanted = msgspec.json.decode(ours, type=WantedFleet)
    kept = msgspec.json.decode(ray.get(keeper.want.remote(ours), timeout=ANSWER_SECONDS), type=WantedFleet)
    if kept.version <= wanted.version:
        return wanted
    kept = msgspec.structs.replace(kept, address=wanted.address)
    write_whole(file, msgspec.json.encode(kept))
    return kept


def follow(file: Path, roster: Path) -> None:
    """Run the keeper of the fleet that ``file`` describes, and write the roster when it changes; never return."""
    wanted = msgspec.json.decode(read_whole(file), type=WantedFleet)
    ray = connect(wanted.address)
    keeper = keeper_of(ray, wanted)
    entries, failure = _entries_of(roster), ""
    while True:
        try:
            wanted = _agreed(ray, keeper, file)
            found = msgspec.json.decode(ray.get(keeper.roster.remote(), timeout=ANSWER_SECONDS), type=list[RosterEntry])
            after = merged(wanted.engines, entries, found)
            if after != entries:
                write_whole(roster, write_roster(after))
                entries = after
            _, said = msgspec.json.decode(ray.get(keeper.reports.remote(), timeout=ANSWER_SECONDS))
        except ray.exceptions.ActorDiedError:
            keeper, said = keeper_of(ray, wanted), "the keeper is restarted"
        except (ray.exceptions.RayError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        if said != failure:
            (logger.warning if said else logger.info)("the fleet on Ray: %.500s", said or "its keeper answers again")
            failure = said
        time.sleep(LOOK_SECONDS)


def _entries_of(roster: Path) -> list[RosterEntry]:
    """Return the roster that an earlier follower of this fleet wrote; empty if there is none."""
    try:
        return msgspec.json.decode(read_whole(roster, MOST_BYTES), type=list[RosterEntry])
    except FileNotFoundError:
        return []


def stop(wanted: WantedFleet) -> None:
    """Stop the fleet's engines, their owners and the keeper; do nothing if the fleet does not exist."""
    ray = connect(wanted.address)
    try:
        keeper = ray.get_actor(wanted.keeper, namespace=NAMESPACE)
    except ValueError:
        return
    ray.get(keeper.stop.remote(), timeout=STOP_SECONDS)
    ray.kill(keeper, no_restart=True)


def main(arguments: list[str]) -> int:
    """Follow or stop the fleet that a file describes; return the exit code."""
    log_to_stderr("info", "text")
    wanted = msgspec.json.decode(read_whole(Path(arguments[0])), type=WantedFleet)
    try:
        if len(arguments) > 1:
            follow(Path(arguments[0]), Path(arguments[1]))
        else:
            stop(wanted)
    except TercetError as error:
        print(f"tercet: {error.message}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
