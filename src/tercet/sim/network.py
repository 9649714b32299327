"""The engines of one simulation and the links between them.

Each engine has one link out and one link in. A link serves one transfer after the other, so transfers that share an
end wait for each other. Layers leave while their step computes: a transfer may start when the first layer is done, and
ends no earlier than the last layer's bytes need after the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.protocol import KVAddrInfo, TransferFailed
from tercet.sim.send import Receiver
from tercet.sim.tokens import Prompts

if TYPE_CHECKING:
    from tercet.sim.engine import SimEngine


class Network:
    """Engines by name, their links, and the prompts that they all see."""

    def __init__(self, prompts_kept: int = 4096) -> None:
        self.prompts = Prompts(prompts_kept)
        self.bytes_sent = 0
        self._engines: dict[str, SimEngine] = {}
        self._out_free: dict[str, float] = {}
        self._in_free: dict[str, float] = {}

    def add(self, engine: SimEngine) -> None:
        """Connect an engine under its name."""
        if engine.name in self._engines:
            raise ValueError(f"two engines are called {engine.name}")
        self._engines[engine.name] = engine

    def find(self, info: KVAddrInfo) -> Receiver:
        """The engine that made this reservation; raises :class:`~tercet.protocol.TransferFailed` if there is none."""
        found = self._engines.get(info.engine)
        if found is None:
            raise TransferFailed(f"no engine of this simulation is called {info.engine}", "kv_addr_info")
        return found

    def book(self, sender: SimEngine, receiver: Receiver, size: int, first: float, last: float) -> float:
        """Reserve the links for ``size`` bytes; returns when the last of them is acknowledged.

        The first layer is ready at ``first``, the last one at ``last``, both in seconds of virtual time.
        """
        out, into = sender.transfer, receiver.transfer
        speed = min(out.bytes_per_second, into.bytes_per_second)
        begin = max(first, self._out_free.get(sender.name, 0.0), self._in_free.get(receiver.name, 0.0))
        end = begin + size / speed
        self._out_free[sender.name] = self._in_free[receiver.name] = end
        self.bytes_sent += size
        last_layer = size / speed / sender.profile.model.layers
        return max(end, last + last_layer) + into.latency
