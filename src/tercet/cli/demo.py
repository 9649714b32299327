"""``tercet demo``: show an answer that two engines compute together, and the steps of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tercet.cli.chat import Chat
from tercet.cli.terminal import say, write
from tercet.cli.up import require_usable, run_fleet
from tercet.cluster.up_config import UpConfig
from tercet.protocol import EngineError
from tercet.protocol.headers import TRACE_HEADER

if TYPE_CHECKING:
    from tercet.cluster.running_fleet import StartedFleet
    from tercet.fleet.fleet_view import Trace
    from tercet.protocol.spans import TraceEvent

MAX_TOKENS = 48
PASSAGE = """\
The harbour of Varn lies where two rivers meet the sea. Every morning the ferry crosses from the old town to the
lighthouse, carries bread and letters over, and brings fish back. The keeper of the lighthouse is called Maren. She has
kept the lamp for thirty years, and in all that time it went dark only once, in the winter when the ice was so thick
that no oil could be brought across. That night Maren lit a fire of driftwood on the cliff and sat by it until dawn, and
the three ships that were at sea found their way home. Since then the people of Varn bring her a log of driftwood each
year, on the shortest day, and stack it beside her door. The stack is higher than the door now, and Maren says that she
will never be cold again, and that the lamp has never been so bright.

Of the three ships, the first was a herring boat with a crew of four, all of them brothers. The second carried salt from
the south and had lost her mast off the outer rocks. The third was the mail ship, and aboard her was a schoolmaster on
his way to a post that he had not yet seen. He wrote down what he remembered of that night: that the snow came sideways,
that nobody spoke, and that the light on the cliff was red and low and moved a little, like something alive. He had
meant to stay in Varn for one year. He taught there for twenty-six, and each winter, when the first ice came, he took
his pupils up to the cliff and let them carry the wood. The youngest were allowed to light it. When he was old he was
asked why he had never gone home, and he answered that he had, once, and that somebody had left a fire burning for him.
"""
QUESTION = "Who keeps the lighthouse of Varn, and what did she do on the night when the lamp went dark?"


def demo(max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer (tokens).")] = MAX_TOKENS) -> None:
    """Start two engines with a small model, and ask them one question.

    One engine prefills the prompt and pushes its KV into the other one, which decodes the answer. The demo takes about
    a minute, most of it for loading.
    """
    say("Starting a prefill engine, a decode engine and a router, with SmolLM2-135M.")
    require_usable(config := UpConfig(port=0))
    run_fleet(config, lambda fleet: _show(fleet, max_tokens))


async def _show(fleet: StartedFleet, max_tokens: int) -> None:
    from tercet.cli.terminal import console

    console.print(f"\n[dim]{PASSAGE}[/dim]\n[bold]{QUESTION}[/bold]\n")
    _report(await _ask(fleet.url, max_tokens), "What happened")
    say("\nThe same question again:\n")
    _report(await _ask(fleet.url, max_tokens), "What happened, now that both engines have cached the passage")
    say("\nStopping. To run your own fleet: tercet up --help")


async def _ask(url: str, max_tokens: int) -> Trace:
    """Print one answer as it arrives, and return its trace. Raises :class:`~tercet.protocol.TercetError`."""
    from tercet.fleet.fleet_view import Trace

    options = {"model": "smollm2", "max_tokens": max_tokens, "temperature": 0}
    talk = Chat(url, None, options, headers={TRACE_HEADER: "1"})
    try:
        await talk.ask(f"{PASSAGE}\n{QUESTION}", write)
    finally:
        say("\n")
    if talk.trace is None:
        raise EngineError("the router's answer has no trace")
    return msgspec.convert(talk.trace, Trace)


def _report(trace: Trace, title: str) -> None:
    from tercet.cli.terminal import console

    console.print(f"[bold]{title}[/bold] (program: {trace.program})")
    for event in trace.events:
        say("  " + sentence(event))
    times = {"TTFT": trace.ttft, "TPOT": trace.tpot}
    if known := [f"{name} {seconds * 1000:.0f} ms" for name, seconds in times.items() if seconds is not None]:
        say("  " + ", ".join(known))


def sentence(event: TraceEvent) -> str:
    """Return a sentence that describes one step of an engine."""
    took = f"({event.seconds * 1000:.0f} ms)"
    match event.verb:
        case "prep_recv":
            return (
                f"{event.engine} reserved room for {event.end} tokens; {event.cached} of them were in its cache {took}"
            )
        case "remote_send":
            over = f" over {event.transport}" if event.transport else ""
            return (
                f"{event.engine} prefilled {event.computed} tokens ({event.cached} were cached) and pushed "
                f"tokens [{event.begin}, {event.end}) to {event.to or 'the other engine'}: "
                f"{event.bytes / 1e6:.1f} MB in {event.chunks} chunks{over} {took}"
            )
        case "start_generate":
            return (
                f"{event.engine} decoded: {event.cached} tokens from its cache, {event.received} received, "
                f"{event.computed} computed {took}"
            )
        case other:
            return f"{event.engine}: {other} {took}"
