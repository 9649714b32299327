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
from tercet.fleet.discovery import MOST_BYTES, RosterEntry, write_roster
from tercet.logs import log_to_stderr
from tercet.protocol import BadRequest, TercetError
from tercet_ray.fleet_keeper import FleetKeeper, WantedFleet, merged
from tercet_ray.ray_access import NAMESPACE, connect

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
    found = msgspec.json.decode(kept, type=WantedFleet)
    # Versions of one fleet may differ in the number of engines, which all have the same settings.
    one, other = (_comparable(each, by_engine=found.version == wanted.version) for each in (found, wanted))
    if one != other:
        raise BadRequest(
            f"--on: a fleet called {wanted.name} runs on {wanted.address} with other settings; stop it with `tercet "
            "down`, or choose another --fleet-name",
            "on",
        )
    return keeper


def once_it_runs(ray: Any, answer: Any) -> bytes:
    """Wait without a limit for a keeper's first answer: Ray may first have to create an environment for the keeper."""
    is_logged = False
    while True:
        try:
            return ray.get(answer, timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if not is_logged:
                logger.warning("the fleet on Ray: its keeper does not run yet; waiting for it")
            is_logged = True


def _comparable(fleet: WantedFleet, by_engine: bool) -> WantedFleet:
    """Return the fleet without what differs at each start of the command; or also with one nameless engine for all."""
    engines = tuple(msgspec.structs.replace(each, log_dir=None) for each in fleet.engines)
    if by_engine:
        return msgspec.structs.replace(fleet, address="", engines=engines)
    nameless = msgspec.structs.replace(engines[0].spec, name="")
    one = msgspec.structs.replace(engines[0], spec=nameless, role="both")
    return msgspec.structs.replace(fleet, address="", engines=(one,), version=0)


def follow(file: Path, roster: Path) -> None:
    """Run the keeper of the fleet that ``file`` describes, and write the roster when it changes; never return."""
    wanted = msgspec.json.decode(read_whole(file), type=WantedFleet)
    ray = connect(wanted.address)
    keeper = keeper_of(ray, wanted)
    try:
        entries = msgspec.json.decode(read_whole(roster, MOST_BYTES), type=list[RosterEntry])
    except FileNotFoundError:  # no earlier follower of this fleet wrote one
        entries = []
    failure = ""
    while True:
        try:
            # The newer of the file's and the keeper's wanted fleet is written to the other one.
            ours = read_whole(file)
            wanted = msgspec.json.decode(ours, type=WantedFleet)
            kept = msgspec.json.decode(ray.get(keeper.want.remote(ours), timeout=ANSWER_SECONDS), type=WantedFleet)
            if kept.version > wanted.version:
                wanted = msgspec.structs.replace(kept, address=wanted.address)
                write_whole(file, msgspec.json.encode(wanted))
            found = msgspec.json.decode(ray.get(keeper.roster.remote(), timeout=ANSWER_SECONDS), type=list[RosterEntry])
            after = merged(wanted.engines, entries, found)
            if after != entries:
                write_whole(roster, write_roster(after))
                entries = after
            _, now = msgspec.json.decode(ray.get(keeper.reports.remote(), timeout=ANSWER_SECONDS))
        except ray.exceptions.ActorDiedError:
            keeper, now = keeper_of(ray, wanted), "the keeper is restarted"
        except (ray.exceptions.RayError, OSError) as error:
            now = f"{type(error).__name__}: {error}"
        if now != failure:
            (logger.warning if now else logger.info)("the fleet on Ray: %.500s", now or "its keeper answers again")
            failure = now
        time.sleep(LOOK_SECONDS)


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
