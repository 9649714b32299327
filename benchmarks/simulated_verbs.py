"""CPU time of a sequence on a simulated engine, and of the same calls on the verbs of real engines, in virtual time.

    python benchmarks/simulated_verbs.py [--tokens 512,4096,12000] [--sequences 1000] [--rounds 3]

Around the verbs there is nothing: blocks, requests and agents answer at once, and cost nothing. What the verbs take is
added to the time of a simulated engine that runs on them (docs/adr/0020-simulated-engines-share-rules.md).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import msgspec

from tercet.engine import edge as edge_module
from tercet.engine import verbs
from tercet.engine.agents import AgentCalls, AgentReports
from tercet.engine.edge import Edge
from tercet.engine.interface import EngineDescription, KeyedPrompt, ModelLimits, ReservedBlocks
from tercet.engine.liveness_probe import LivenessProbe
from tercet.protocol import Output, Request
from tercet.protocol.wire import PrepRecvCall, RemoteSendCall, StartGenerateCall
from tercet.store.server import NamedAdapters
from tercet.transport import PushCached, SendDone
from tercet_lab.sim import Network, SimEngine, run_virtual
from tercet_lab.sim.step_times import Profile, load_profile

OUTPUT = 128
Prompts = Sequence[tuple[int, ...]]


class NoSocket(AgentReports):
    """The inbox of reports without its socket, which virtual time does not have."""

    def __init__(self, ranks: int, *_: object) -> None:
        self._ranks, self._sends = ranks, {}
        self._address = self._key = ""

    def take(self, send_id: str) -> None:
        self._sends[send_id].take(SendDone(send_id, 0))


class Costless:
    """An edge's halves and its agent; each answers at once."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.limits, self.version, self.model, self.model_dtype = ModelLimits(2**31, 2**31), "", "m", ""
        self.reports: Any = None

    async def reserve(self, lease: str, prompt: KeyedPrompt) -> ReservedBlocks:
        blocks = list(range(len(prompt.tokens) // self.block_size + 1))
        return ReservedBlocks(0, [blocks], self.block_size)

    async def release(self, lease: str, valid_end: int) -> int:
        return valid_end

    async def push_cached(self, *_: object) -> list[Any]:
        return []

    async def end_send(self, send_id: str) -> None: ...

    async def sequences(self) -> list[Any]:
        return []

    async def status(self) -> Mapping[str, Any]:
        return {}

    def request(self, prompt: KeyedPrompt, *_: object) -> Any:
        async def outputs() -> AsyncGenerator[Output]:
            yield Output((1,))
            yield Output((1,) * (OUTPUT - 1), "length")

        return SimpleNamespace(
            prompt=prompt, request_id="r", span=None, num_cached=0, abort=lambda: None, outputs=outputs
        )  # fmt: skip

    def call(self, command: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(0)
        if isinstance(command, PushCached):
            self.reports.take(command.plan.send_id)
        return answer


def edge_of(profile: Profile) -> Edge:
    """Return the edge of an engine that costs nothing."""
    costless: Any = Costless(profile.block_size)
    about = EngineDescription([["tcp://127.0.0.1:1"]], [], [], profile.layout(), "", 60.0, 1.0, None)
    probe = LivenessProbe(costless.status, [], [])
    edge = Edge("e", about, costless, costless, AgentCalls([costless]), NamedAdapters(), probe)
    costless.reports = edge.reports
    return edge


async def generate_on_verbs(profile: Profile, prompts: Prompts) -> None:
    """Generate on one engine."""
    edge = edge_of(profile)
    for number, prompt in enumerate(prompts):
        async for _ in verbs.start_generate(edge, StartGenerateCall(prompt=prompt, seq_id=f"{number}")):
            pass


async def send_on_verbs(profile: Profile, prompts: Prompts) -> None:
    """Compute the KV on one engine and decode on another one."""
    sender, receiver = edge_of(profile), edge_of(profile)
    for number, prompt in enumerate(prompts):
        seq_id = f"{number}"
        info = (await verbs.prep_recv(receiver, PrepRecvCall(prompt=prompt, seq_id=seq_id))).kv_addr_info
        await verbs.remote_send(sender, RemoteSendCall(prompt=prompt, seq_id=seq_id, kv_addr_info=info, begin=0))
        call = StartGenerateCall(prompt=prompt, seq_id=seq_id, begin=len(prompt))
        async for _ in verbs.start_generate(receiver, call):
            pass


def request_of(number: int, prompt: tuple[int, ...]) -> Request:
    """Return the request with this number."""
    return Request(seq_id=f"{number}", prompt=prompt, sampling_params={"max_tokens": OUTPUT})


async def generate_simulated(profile: Profile, prompts: Prompts) -> None:
    """Do as :func:`generate_on_verbs`, simulated."""
    engine = SimEngine("e", profile, Network())
    for number, prompt in enumerate(prompts):
        await engine.start_generate(request_of(number, prompt)).run(lambda _: None)


async def send_simulated(profile: Profile, prompts: Prompts) -> None:
    """Do as :func:`send_on_verbs`, simulated."""
    network = Network()
    sender, receiver = SimEngine("a", profile, network), SimEngine("b", profile, network)
    for number, prompt in enumerate(prompts):
        request = request_of(number, prompt)
        async with receiver.prep_recv(request) as reservation:
            await sender.remote_send(request, reservation, 0)
            await receiver.start_generate(request, len(prompt)).run(lambda _: None)


WAYS: Mapping[str, Callable[[Profile, Prompts], Coroutine[Any, Any, None]]] = {
    "one engine, simulated": generate_simulated,
    "one engine, verbs": generate_on_verbs,
    "three verbs, simulated": send_simulated,
    "three verbs, verbs": send_on_verbs,
}


def main() -> None:
    """Measure each way in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,4096,12000", help="lengths of prompts")
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    edge_module.AgentReports = NoSocket
    profile = msgspec.structs.replace(load_profile("llama-3.1-8b-h100-tp1"), call=0.0)
    for length in map(int, given.tokens.split(",")):
        prompts = [tuple((number * 7919 + at) % 30000 for at in range(length)) for number in range(given.sequences)]
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way, run in WAYS.items():
                began = time.process_time()
                run_virtual(run(profile, prompts))
                found[way].append((time.process_time() - began) / given.sequences * 1e6)
        for way, times in found.items():
            print(f"{length} tokens, {way}: {median(times):.0f} µs ({min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main()
