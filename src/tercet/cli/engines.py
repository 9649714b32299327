"""``tercet engines``: show and change a running router's engines, their roles and adapters; move its sequences."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.commands import Commands
from tercet.cli.program import state_in_words
from tercet.cli.router_calls import Json, RunningRouter, show_answer, understood
from tercet.cli.setting_flags import flags_as_records, given_as
from tercet.cli.terminal import say
from tercet.protocol import BadRequest, MemberRole, Role, UnknownPath
from tercet.settings import require_engine_url


def roles_in_words(found: dict[str, Any]) -> Iterator[str]:
    """Return the router's answer about roles as lines."""
    yield objectives_in_words(found["objectives"])
    yield from classes_in_words(found["objectives"])
    by_role = {role: [name for name, its in found["engines"].items() if its == role] for role in ("prefill", "decode")}
    yield f"roles: {found['roles']}; " + "; ".join(f"{role}: {', '.join(by_role[role]) or 'none'}" for role in by_role)
    decision = found["decision"]
    if decision is None:
        return
    yield f"pressure: prefill {_share(decision['prefill_pressure'])}, decode {_share(decision['decode_pressure'])}"
    yield f"{max(0.0, time.time() - decision['at']):.1f} s ago: {decision['why']}"
    for flip in decision["flips"]:
        when = time.strftime("%H:%M:%S", time.localtime(flip["at"]))
        yield f"  {when}  {', '.join(flip['engines'])} -> {flip['role']}: {flip['reason']}"


def classes_in_words(objectives: dict[str, Any]) -> Iterator[str]:
    """Return a line for each class of requests."""
    for each in objectives.get("classes", ()):
        said = objectives_in_words(each).removeprefix("objectives: ")
        yield f"  {objectives['header']}: {each['name']}: {said}"


def objectives_in_words(objectives: dict[str, Any]) -> str:
    """Return the objectives, and the share of requests that met them, as a line."""
    limits = [f"{name.upper()} {objectives[name]:g} s" for name in ("ttft", "tpot") if objectives[name] is not None]
    if not limits:
        return "no objectives"
    said = f"objectives: {', '.join(limits)} for {objectives['share']:.1%} of the requests"
    if objectives["attainment"] is None:
        return f"{said}; no request has ended yet"
    return f"{said}; met by {objectives['attainment']:.1%} of {objectives['requests']}"


def _share(pressure: float | None) -> str:
    return "unknown" if pressure is None else f"{pressure:.0%}"


@flags_as_records
def adapters(
    adapter: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME=PATH",
            help="Adapter to load: its name, and its path on every engine. With `--unload`: NAME only.",
            show_default=False,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Load the files at PATH again for an adapter that is loaded.")
    ] = False,
    unload: Annotated[bool, typer.Option("--unload", help="Refuse new requests for the adapter.")] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show, load, replace or unload LoRA adapters of a running fleet.

    Without NAME=PATH the command lists each adapter: name, digest of its contents, path, and the engines that have it.
    An adapter is loaded on every engine that accepts adapters, or on none; then requests may name it as their model.
    Start engines with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. An adapter is not replaced while
    requests use it; running requests of an unloaded adapter continue on their engine.

    Examples:
    - `tercet engines adapters`
    - `tercet engines adapters sql=/models/adapters/sql-v3`
    - `tercet engines adapters sql=/models/adapters/sql-v4 --replace`
    - `tercet engines adapters sql --unload`
    """
    if replace and unload:
        raise BadRequest("--unload: cannot be combined with --replace", "--unload")
    if adapter is None:
        if replace or unload:
            flag = "--replace" if replace else "--unload"
            raise BadRequest(f"{flag}: needs an adapter; give its NAME", flag)
        show_answer(router.ask("GET", "/adapters"), as_json, _in_words)
        return
    with given_as({"name": "NAME", "path": "PATH"}):
        if unload:
            router.ask("DELETE", f"/adapters/{quote(adapter, safe='')}")
            say(f"{adapter} is unloaded")
            return
        name, equals, path = adapter.partition("=")
        if not (name and equals and path):
            why = "must have a name and a path, such as sql=/models/adapters/sql-v3"
            raise BadRequest(f"NAME=PATH: {adapter!r} {why}", "NAME=PATH")
        if replace:
            found = router.ask("PUT", f"/adapters/{quote(name, safe='')}", {"path": path})
        else:
            found = router.ask("POST", "/adapters", {"name": name, "path": path})
    show_answer([found], as_json, _in_words)


def _in_words(found: list[dict[str, Any]]) -> Iterator[str]:
    width = max((len(each["name"]) for each in found), default=0)
    for each in found:
        where = ", ".join(each["engines"]) or "no engine"
        yield f"{each['name']:{width}}  {each['digest']}  {each['path']}  on {where}"


@flags_as_records
def move(
    seq_id: Annotated[str, typer.Argument(help="Id of a running sequence; `tercet status --sequences` lists ids.")],
    destination: Annotated[str, typer.Argument(help="Engine to which the sequence is moved.")],
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Move a running sequence to another engine, with its KV; see `tercet status --moves`.

    Example: `tercet engines move cmpl-8d1f-0 decode-1`
    """
    path = f"/sequences/{quote(seq_id, safe='')}/move"
    answer = router.ask("POST", path, {"destination": destination})
    with understood():
        passed_on = "accepted" in answer
        text = "forwarded to the router that runs the sequence, which lists the move" if passed_on else in_words(answer)
        say(json.dumps(answer) if as_json else text)


def _moves(router: RunningRouter, follow: bool) -> Iterator[dict[str, Any]]:
    """Yield moves in the order in which they began; with ``follow``, wait for the end of each running move."""
    last = 0
    while True:
        # In the order of their begin: one that runs still holds back those after it, so that none is printed twice or
        # left out.
        for move in router.ask("GET", f"/moves?since={last}"):
            if follow and move["outcome"] == "under_way":
                break
            last = move["number"]
            yield move
        if not follow:
            return
        time.sleep(POLL_SECONDS)


def in_words(move: dict[str, Any]) -> str:
    """Return one move as a line."""
    line = (
        f"{move['number']:5}  {move['seq_id']}  {move['source']} -> {move['destination']}  {move['reason']}  "
        f"{move['outcome']}"
    )
    stages = f"{len(move['stages'])} stage{'' if len(move['stages']) == 1 else 's'}"
    size = f"{stages}, {move['bytes'] / 1e6:.1f} MB"
    if move["error"]:
        return f"{line}: {move['error']}" + (f"; sent before: {size}" if move["stages"] else "")
    pause = "" if move["pause"] is None else f", pause {move['pause'] * 1000:.0f} ms"
    return f"{line}  {move['tokens']} tokens, {size}, {move['recomputed']} tokens recomputed{pause}"


POLL_SECONDS = 0.5

engines = Commands(
    name="engines",
    help="Change the engines of a running router, their LoRA adapters, and where sequences run; see `tercet status`.",
)
Name = Annotated[str, typer.Argument(help="Name of the engine in the fleet.")]


@engines.command()
@flags_as_records
def add(
    name: Name,
    engine_url: Annotated[str, typer.Argument(metavar="ENGINE_URL", help="Base URL of the engine's server.")],
    role: Annotated[MemberRole, typer.Option(help="Role of the engine in this fleet.")] = "both",
    *,
    router: RunningRouter,
) -> None:
    """Add a running engine; it must serve the fleet's model, with the same context length.

    Example: `tercet engines add decode-2 http://10.0.0.7:8001 --role decode`
    """
    require_engine_url(engine_url, "ENGINE_URL", "http://10.0.0.7:8001")
    body = {"name": name, "url": engine_url.rstrip("/"), "role": role}
    with given_as({"url": "ENGINE_URL", "name": "NAME"}):
        added = router.ask("POST", "/engines", body)
    with understood():
        say(engine_in_words(added))


@engines.command()
@flags_as_records
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Pick the engine again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the engine has no running sequences.")] = False,
    *,
    router: RunningRouter,
) -> None:
    """Drain an engine: it gets no new requests, and its running sequences move to other engines with their KV.

    A sequence that cannot be moved finishes on the engine. The moves that `--wait` counts are those of the router
    process that answers.
    """
    if undo and wait:
        raise BadRequest("--wait: cannot be combined with --undo", "--wait")
    # Before the drain: what it causes has larger numbers.
    last = dict[str, int | None]()
    with understood():
        for path in ("/moves", "/contexts") if wait else ():
            try:
                last[path] = max((each["number"] for each in router.ask("GET", path)), default=0)
            except UnknownPath:  # a router before 0.4 has no contexts
                last[path] = None
    engine = router.ask("DELETE" if undo else "POST", f"{_path(name)}/drain")
    with understood():
        say(engine_in_words(engine))
        if not wait:
            return

        def caused(path: str, at: str) -> list[dict[str, Any]]:
            after = last[path]
            records: list[dict[str, Any]] = [] if after is None else router.ask("GET", f"{path}?since={after}")
            return [each for each in records if each[at] == name]

        said = engine["in_flight"]
        # No timeout here: a long answer that cannot move may run for hours, and Ctrl-C ends the wait.
        while engine["in_flight"] or not all(each["is_over"] for each in caused("/contexts", "engine")):
            time.sleep(POLL_SECONDS)
            engine = {each["name"]: each for each in router.ask("GET", "/engines")}[name]
            if engine["in_flight"] != said and (said := engine["in_flight"]):
                say(f"{said} sequences still run on {name}")
        moved = [each for each in caused("/moves", "source") if each["outcome"] == "moved"]
        to = Counter(each["destination"] for each in moved)
        where = [f"{count} moved to {engine}" for engine, count in sorted(to.items())] or ["none moved"]
        found = contexts_in_words(caused("/contexts", "engine"))
        say(f"{name} is empty: {', '.join([*where, '0 left'])}" + (f"; {found}" if found else ""))


def contexts_in_words(records: list[dict[str, Any]]) -> str:
    """Return what became of an engine's contexts, by its records of one or more drains; empty if it passed none on."""
    contexts, tokens, dropped = Counter[str](), Counter[str](), Counter[str]()
    for each in records:
        for name, its in each["to"].items():
            contexts[name] += its["contexts"]
            tokens[name] += its["tokens"]
        dropped.update(each["dropped"])
    parts = list[str]()
    for name, count in sorted(contexts.items()):
        if parts:
            parts.append(f"{count} ({tokens[name]:,}) to {name}")
        else:
            parts.append(f"{count} context{'s' * (count > 1)} ({tokens[name]:,} tokens) went to {name}")
    if dropped and not parts:
        parts.append("no context went to another")
    parts += [f"{count} {'was' if count == 1 else 'were'} dropped ({why})" for why, count in sorted(dropped.items())]
    rest = dict.fromkeys(each["rest"] for each in records if each["rest"])
    return ", ".join([*parts, *(f"further ones were not tried ({why})" for why in rest)])


@engines.command()
@flags_as_records
def remove(name: Name, router: RunningRouter) -> None:
    """Remove an engine from the fleet at once; its running sequences finish, and its process continues."""
    gone = router.ask("DELETE", _path(name))
    with understood():
        say(f"{name} removed; {gone['in_flight']} sequences still run on it")


@engines.command("role")
@flags_as_records
def set_role(
    name: Name, role: Annotated[Role, typer.Argument(help="New role of the engine.")], router: RunningRouter
) -> None:
    """Change the role of an engine."""
    changed = router.ask("PUT", f"{_path(name)}/role", {"role": role})
    with understood():
        say(engine_in_words(changed))


@engines.command("roles")
@flags_as_records
def explain_roles(router: RunningRouter, as_json: Json = False) -> None:
    """Show the objectives, the share of requests that met them, and the reasons for roles (`--roles auto`)."""
    show_answer(router.ask("GET", "/roles"), as_json, roles_in_words)


engines.command()(move)
engines.command()(adapters)


def _path(name: str) -> str:
    return f"/engines/{quote(name, safe='')}"


def state_of(engine: dict[str, Any]) -> str:
    """Return an engine's state in one word."""
    leaving = "draining" if engine["draining"] else "stopping" if engine["stopping"] else ""
    # A paused engine keeps its sequences; one that drains loses them.
    leaving = leaving or ("paused" if engine.get("paused") else "")  # a router before 0.3 does not report it
    return leaving or ("serving" if engine["reachable"] else "refused" if engine["refused"] else "unreachable")


def engine_in_words(engine: dict[str, Any], width: int = 0) -> str:
    """Return one engine as a line; its name is padded to ``width`` characters."""
    count, report = engine.get("restarts") or 0, engine["report"]
    loaded = "no report"
    if report is not None:
        busy = f"{report['running']} running, {report['waiting']} waiting"
        loaded = f"{busy}, KV {report['kv_usage']:.0%} ({report['age']:.1f} s ago)"
    return (
        f"{engine['name']:{width}}  {engine['role']:7}  {state_of(engine):11}  {engine['in_flight']:4}  "
        f"{engine['url']}  {engine['refused'] or loaded}" + (f", {count} restart{'s' * (count > 1)}" if count else "")
    )


def rates_in_words(recent: dict[str, Any]) -> str:
    """Return the rates of a router's last seconds as words."""
    ttft = "no TTFT" if recent["ttft_p50"] is None else f"TTFT {recent['ttft_p50'] * 1000:.0f} ms"
    return (
        f"{recent['requests']:.1f} requests/s, {recent['tokens']:.0f} tokens/s, {ttft}, "
        f"{recent['failures']:.1f} failures/s, {recent['refusals']:.1f} refusals/s"
    )


@flags_as_records
def status(
    sequences: Annotated[
        bool,
        typer.Option(
            "--sequences",
            help="Show running sequences instead: id, engine, tokens of prompt and output, seconds, program.",
        ),
    ] = False,
    moves: Annotated[bool, typer.Option("--moves", help="Show moves instead, oldest first: one line each.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show new moves too, until Ctrl-C; needs --moves.")] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show a running router: model, program, engines and their load, and moves.

    An engine's line has its name, role, state, number of sequences, URL, and the last report of its load. The exit code
    is 0 if the router can serve, 1 if it cannot or does not answer, and 2 for wrong options. A move's line has its
    sequence, source, destination, reason, outcome, stages, and the pause of its client.

    Examples:
    - `tercet status`
    - `tercet status --sequences`
    - `tercet status --moves --follow`
    """
    if sequences and moves:
        raise BadRequest("--moves: cannot be combined with --sequences", "--moves")
    if follow and not moves:
        raise BadRequest("--follow: needs --moves", "--follow")
    if moves:
        with understood():
            for each in _moves(router, follow):
                say(json.dumps(each) if as_json else in_words(each))
        return
    if sequences:
        show_answer(
            router.ask("GET", "/sequences"),
            as_json,
            lambda found: (
                f"{each['seq_id']}  {each['engine'] or '-'}  {each['prompt_tokens']} + {each['tokens']} tokens  "
                f"{each['seconds']:.1f} s  {each['program']}"
                for each in found
            ),
        )
        return
    found: dict[str, Any] = router.ask("GET", "/status")
    show_answer(found, as_json, lambda found: _status_in_words(router.at, found))
    with understood():
        serves = bool(found["serving"])
    if not serves:
        raise typer.Exit(1)


def _status_in_words(url: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"{url}: {'serves' if found['serving'] else 'does not serve'} {', '.join(found['models'])}"
    if found["why"]:
        yield f"  {found['why']}"
    yield from state_in_words(found["program"])
    yield f"{objectives_in_words(found['objectives'])}; roles: {found['roles']}"
    yield from classes_in_words(found["objectives"])
    if recent := found.get("recent"):  # a router before 0.4 does not report it
        yield f"last {recent['seconds']:.0f} s: {rates_in_words(recent)}"
    engines = found["engines"]
    width = max((len(engine["name"]) for engine in engines), default=0)
    yield f"{len(engines)} engines, {sum(engine['in_flight'] for engine in engines)} sequences on them"
    yield from (f"  {engine_in_words(engine, width)}" for engine in engines)
    yield f"{len(found['moves'])} running moves"
    yield from (in_words(move) for move in found["moves"])
