"""``tercet demo``: an answer that crossed engines, and what happened on its way."""

from __future__ import annotations

import tempfile
from typing import Annotated, Any

import aiohttp
import msgspec
import typer

from tercet.cli.fleet_run import console, run_fleet
from tercet.cluster.local import RunningFleet
from tercet.cluster.spec import UpConfig
from tercet.protocol import EngineError

MAX_TOKENS = 48
PASSAGE = """\
The harbour of Varn lies where two rivers meet the sea. Every morning the ferry crosses from the old town to the
lighthouse, carries bread and letters over, and brings fish back. The keeper of the lighthouse is called Maren. She has
kept the lamp for thirty years, and in all that time it went dark only once, in the winter when the ice was so thick
that no oil could be brought across. That night Maren lit a fire of driftwood on the cliff and sat by it until dawn, and
the three ships that were at sea found their way home. Since then the people of Varn bring her a log of driftwood each
year, on the shortest day, and stack it beside her door. The stack is higher than the door now, and Maren says that she
will never be cold again, and that the lamp has never been so bright."""
QUESTION = "Who keeps the lighthouse of Varn, and what did she do on the night when the lamp went dark?"


def demo(
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of the answer.")] = MAX_TOKENS,
) -> None:
    """Start two engines with a small model, and ask them a question together.

    One engine reads the prompt and pushes its KV into the other one, which answers. Takes about a minute, most of it
    loading.
    """
    console.print("Starting a prefill engine, a decode engine and a front door, with SmolLM2-135M on the CPU.")
    with tempfile.TemporaryDirectory(prefix="tercet-demo-") as logs:
        config = UpConfig(port=0, log_dir=logs)
        run_fleet(config, lambda fleet: _show(fleet, max_tokens))


async def _show(fleet: RunningFleet, max_tokens: int) -> None:
    console.print(f"\n[dim]{PASSAGE}[/dim]\n\n[bold]{QUESTION}[/bold]\n")
    _report(await _ask(fleet, max_tokens), "What happened")
    console.print("\nThe same question again:\n")
    _report(await _ask(fleet, max_tokens), "What happened, now that both engines know the passage")


async def _ask(fleet: RunningFleet, max_tokens: int) -> dict[str, Any]:
    """Stream one answer to the screen; returns its trace."""
    body = {
        "model": "smollm2", "stream": True, "max_tokens": max_tokens, "temperature": 0,
        "messages": [{"role": "user", "content": f"{PASSAGE}\n\n{QUESTION}"}],
    }  # fmt: skip
    trace: dict[str, Any] = {}
    async with (
        aiohttp.ClientSession(headers={"x-tercet-trace": "1"}) as session,
        session.post(f"{fleet.url}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise EngineError(f"the front door answered {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data: "))
            trace = event.get("tercet", trace)
            for choice in event.get("choices", ()):
                console.print(choice["delta"].get("content") or "", end="", markup=False)
    console.print("\n")
    if not trace:
        raise EngineError("the answer came without a trace")
    return trace


def _report(trace: dict[str, Any], title: str) -> None:
    console.print(f"[bold]{title}[/bold] (program: {trace['program']})")
    for event in trace["events"]:
        console.print("  " + _sentence({**_NOTHING, **event}))
    ttft, tpot = trace.get("ttft"), trace.get("tpot")
    if ttft is not None and tpot is not None:
        console.print(f"  TTFT {ttft * 1000:.0f} ms, TPOT {tpot * 1000:.0f} ms")


_NOTHING: dict[str, Any] = {"begin": 0, "end": 0, "cached": 0, "received": 0, "computed": 0, "bytes": 0, "pieces": 0}


def _sentence(event: dict[str, Any]) -> str:
    took = f"({event['seconds'] * 1000:.0f} ms)"
    match event["verb"]:
        case "prep_recv":
            return (
                f"{event['engine']} reserved room for {event['end']} tokens; {event['cached']} of them were in its "
                f"cache {took}"
            )
        case "remote_send":
            return (
                f"{event['engine']} prefilled {event['computed']} tokens ({event['cached']} were cached) and pushed "
                f"tokens [{event['begin']}, {event['end']}) to {event['to']}: {event['bytes'] / 1e6:.1f} MB in "
                f"{event['pieces']} pieces {took}"
            )
        case _:
            return (
                f"{event['engine']} decoded: {event['cached']} tokens from its cache, {event['received']} received, "
                f"{event['computed']} computed {took}"
            )
