"""``tercet trace``: draw the steps of a request as lanes over time."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import typer
from rich.text import Text

from tercet.cli.router_calls import Json, RunningRouter, show_answer, understood
from tercet.cli.setting_flags import flags_as_records
from tercet.cli.terminal import console, printable, say
from tercet.protocol import BadRequest

# Characters of a chart that is not written to a terminal.
FILE_WIDTH = 160


@flags_as_records
def trace(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", show_default=False,
            help="Id: the request's `x-request-id`, the `id` of its answer, or the id of its distributed trace.",
        ),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option("--slowest", min=1, max=100, help="Number of slowest requests to list.")
    ] = None,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Draw the steps of a request: a lane for the router and for each engine, with a bar for each step.

    Steps are the wait for admission, picks with their scores, calls of verbs, the first token, failures, retries, and
    moves. Below it, the life of each lease of the request: who had its blocks, until when, and why. Routers keep the
    latest and the slowest requests. Without an ID the latest requests are listed.

    Examples:
    - `tercet trace --slowest 5`
    - `tercet trace cmpl-8d1f`
    """
    if name is None:
        which = "newest=20" if slowest is None else f"slowest={slowest}"
        show_answer(router.ask("GET", f"/traces?{which}"), as_json, _listed)
        return
    if slowest is not None:
        raise BadRequest("--slowest: cannot be combined with an ID", "--slowest")
    if not name.strip():
        raise BadRequest("ID: must not be empty", "ID")
    found = router.ask("GET", f"/traces/{quote(name, safe='')}")
    if as_json:
        say(json.dumps(found))
        return
    with understood():
        for index, each in enumerate(found):
            for line in ([""] if index else []) + list(head_of(each)):
                say(line)
            for line in drawn(each, console.width if console.is_terminal else FILE_WIDTH):
                console.print(line, no_wrap=True, crop=False)
            for line in leases_of(each):
                say(line)


def leases_of(trace: dict[str, Any]) -> Iterator[str]:
    """Return the life of each lease, a line for each step: its time since the request's arrival, ledger and state."""
    for lease in trace.get("leases", ()):
        yield f"  lease {lease['lease']} of {lease['seq_id']} on {lease['engine']}"
        for seconds, ledger, state, cause in lease["steps"]:
            at = _time(max(0.0, lease["at"] - trace["at"] + seconds))
            yield f"  {at:>{TIME_WIDTH}}  {ledger:<12}  {state:<8}  {cause}"


def _listed(found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        yield "no requests yet"
    for each in found:
        tokens = sum(sequence["output_tokens"] for sequence in each["sequences"])
        prompt = sum(sequence["prompt_tokens"] for sequence in each["sequences"])
        programs = ", ".join(dict.fromkeys(sequence["program"] for sequence in each["sequences"])) or "-"
        calls = (event for sequence in each["sequences"] for event in (*sequence["events"], *sequence["failed"]))
        engines = ", ".join(dict.fromkeys(event["engine"] for event in calls if event.get("engine"))) or "-"
        yield (
            f"{each['request_id']}  {each['seconds']:8.3f} s  {each['outcome']}  {prompt} + {tokens} tokens  "
            f"{programs}  {engines}"
        )


# Widths, in characters: of the chart, of the text next to it, of times, and of engines' names.
NARROWEST, WIDEST, TO_THE_RIGHT, TIME_WIDTH, LONGEST_NAME = 16, 100, 50, 8, 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MARK, _LATER, _LATE_START = "◆", "▒", "▐"
_STYLES = {
    "admission": "yellow", "pick": "cyan", "prep_recv": "blue", "extend_recv": "blue", "remote_send": "magenta",
    "start_generate": "green", "move": "bright_cyan", "fallback": "red", "retry": "red",
}  # fmt: skip


class Step(NamedTuple):
    """One row: lane, name, begin and end (seconds from the start of the request), and a text.

    A step without length is drawn as a mark.
    """

    lane: str
    name: str
    begin: float
    end: float
    says: str
    # The time of a generation's first token; None for other steps.
    first: float | None = None
    failed: bool = False


def steps_of(trace: dict[str, Any]) -> list[Step]:
    """Return the steps of a request in the order of their begin."""
    found: list[Step] = []
    if trace["waited"] >= 0.001:
        found.append(Step("router", "admission", 0.0, trace["waited"], f"waited {_time(trace['waited'])} for room"))
    many = len(trace["sequences"]) > 1
    for index, sequence in enumerate(trace["sequences"]):
        prefix = f"{index}: " if many else ""
        # A running step has no end yet.
        until = trace["seconds"] if trace["outcome"] == "running" else 0.0
        found += (step._replace(says=prefix + step.says) for step in _steps(sequence, until))
    return sorted(found, key=lambda step: step.begin)


def _steps(sequence: dict[str, Any], until: float) -> Iterator[Step]:
    for pick in sequence["picks"]:
        at = sequence["at"] + pick["at"]
        scores = pick.get("scores", {})
        said = f"{pick['role']} by {pick['by']}: {pick['engine']}"
        if scores:
            said += f"; scores {', '.join(f'{name} {score:g}' for name, score in scores.items())}"
            said += f" of {pick['candidates']}" if pick["candidates"] > len(scores) else ""
        if pick.get("predicted") is not None:
            said += f"; believed cached {pick['predicted']}"
            if tiers := pick.get("tiers"):
                said += f" ({', '.join(f'{tier} {tokens}' for tier, tokens in tiers.items())})"
        yield Step("router", "pick", at, at, said)
    moves = {move["number"]: move for move in sequence["moves"]}
    for event in sequence["events"]:
        verb, at = event["verb"], sequence["at"] + event.get("at", 0.0)
        end = at + event.get("seconds", 0.0)
        lane = event.get("engine", "") or "router"
        if verb == "start_generate":
            total = event.get("total", 0.0)
            said = f"first token after {_time(event.get('seconds', 0.0))}; prompt: {_tokens(event)}"
            yield Step(lane, "generate", at, at + total if total else max(end, until), said, end)
        elif verb in ("fallback", "retry"):
            yield Step(lane, verb, at, at, event.get("reason", ""), failed=True)
        elif verb == "move":
            yield Step(lane, verb, at, end, _moved(event, moves.get(event.get("number", 0))))
        elif verb == "remote_send":
            said = f"to {event.get('to', '')}: tokens {event.get('begin', 0)}-{event.get('end', 0)}, {_tokens(event)}"
            said += f", {event.get('bytes', 0) / 1e6:.1f} MB by {event.get('transport') or 'nothing'}"
            yield Step(lane, verb, at, end, said)
        else:
            yield Step(lane, verb, at, end, f"tokens 0-{event.get('end', 0)}: {_tokens(event)}")
    for event in sequence["failed"]:
        at = sequence["at"] + event.get("at", 0.0)
        said = f"{event.get('code', '')}: {event.get('reason', '')}"
        yield Step(event.get("engine", ""), event["verb"], at, at + event.get("seconds", 0.0), said, failed=True)


def _tokens(event: dict[str, Any]) -> str:
    counts = [f"{event[name]} {name}" for name in ("cached", "received", "computed") if event.get(name)]
    predicted = event.get("predicted")
    return (", ".join(counts) or "0 cached") + ("" if predicted is None else f" (believed {predicted})")


def _moved(event: dict[str, Any], move: dict[str, Any] | None) -> str:
    pause = event.get("pause")
    said = f"to {event.get('to', '')} ({event.get('reason', '')}): {event.get('outcome', '')}"
    said += "" if pause is None else f", pause {_time(pause)}"
    if move is None:
        return said
    stages = ", ".join(f"{stage['begin']}-{stage['end']}" for stage in move["stages"])
    return said + (f", stages {stages}" if stages else "") + (f": {move['error']}" if move["error"] else "")


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# ---- drawing ----------------------------------------------------------------------------------------------------


def head_of(trace: dict[str, Any]) -> Iterator[str]:
    """Return the lines above the lanes."""
    at = datetime.fromtimestamp(trace["at"], UTC).isoformat(timespec="milliseconds")
    outcome = trace["outcome"] + (f": {trace['reason']}" if trace["reason"] else "")
    yield f"{trace['request_id']}  {trace['path']}  model {trace['model'] or '-'}  at {at}  {outcome}"
    if trace["trace_id"]:
        yield f"  trace {trace['trace_id']}"
    for sequence in trace["sequences"]:
        times = [f"{name} {_time(sequence[name])}" for name in ("ttft", "tpot") if sequence[name] is not None]
        tokens = f"{sequence['prompt_tokens']} + {sequence['output_tokens']} tokens"
        yield f"  {'  '.join([sequence['seq_id'], sequence['program'], tokens, *times])}"


def drawn(trace: dict[str, Any], width: int) -> Iterator[Text]:
    """Return the lanes as lines of at most ``width`` characters; details stand to the right of a bar or below it."""
    steps = steps_of(trace)
    if not steps:
        return
    seconds = max([trace["seconds"], *(step.end for step in steps), 1e-6])
    begins = {step.lane: step.begin for step in reversed(steps)}  # steps are in order, so this is each lane's first
    lanes = sorted(begins, key=lambda lane: (lane != "router", begins[lane]))
    lane_width = max(len(_shown(lane)) for lane in lanes)
    step_width = max(len(_shown(step.name)) for step in steps)
    before = lane_width + step_width + 2 * TIME_WIDTH + 4
    says_there = width - before >= TO_THE_RIGHT + NARROWEST
    chart = min(WIDEST, max(NARROWEST, width - before - (TO_THE_RIGHT if says_there else 0)))
    yield Text(f"{'':{before}}0{_time(seconds):>{chart - 1}}", style="dim")
    for lane in lanes:
        for index, step in enumerate(each for each in steps if each.lane == lane):
            style = "red" if step.failed else _STYLES.get(step.name, "green")
            line = Text().append(f"{_shown(lane) if not index else '':{lane_width}} ", style="bold")
            line.append(f"{_shown(step.name):{step_width}} ", style=style)
            took = "" if step.end == step.begin else _time(step.end - step.begin)
            line.append(f"{_time(step.begin):>{TIME_WIDTH}} {took:>{TIME_WIDTH}} ")
            bar = _bar(step, seconds, chart, style)
            bar.pad_right(max(0, chart - bar.cell_len))
            line.append_text(bar)
            said = printable(step.says)
            indent = before + chart + 1 if says_there else lane_width + 3
            for index, part in enumerate(textwrap.wrap(said, max(NARROWEST, width - indent)) or [""]):
                if index or not says_there:
                    yield line
                    line = Text(" " * (indent - 1))
                line.append(f" {part}", style="red" if step.failed else "dim")
            yield line


def _shown(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"


def _bar(step: Step, seconds: float, width: int, style: str) -> Text:
    """Return the bar of a step, in eighths of a character; it is lighter after the first token of a generation."""
    if step.end <= step.begin:
        place = min(width - 1, int(step.begin / seconds * width))
        return Text(" " * place + _MARK, style=style)
    begin = min(width * 8 - 1, int(step.begin / seconds * width * 8))
    end = max(begin + 1, min(width * 8, round(step.end / seconds * width * 8)))
    first = end if step.first is None else max(begin, min(end, round(step.first / seconds * width * 8)))
    text = Text(" " * (begin // 8))
    for place in range(begin // 8, -(-end // 8)):
        filled = min(end, place * 8 + 8) - max(begin, place * 8)
        if step.first is not None and place * 8 + 4 >= first and filled >= 4:
            text.append(_LATER, style=style)
        elif begin > place * 8:
            text.append(_LATE_START, style=style)
        else:
            text.append(_EIGHTHS[max(1, filled)], style=style)
    return text
