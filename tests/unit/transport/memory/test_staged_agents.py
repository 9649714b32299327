"""Agents of ranks whose KV is reached through buffers, beside one that reaches it where it lies."""

from __future__ import annotations

import pytest

from tercet.protocol import EngineError
from tercet.transport import TransportSettings
from tercet.transport.agent.agent_messages import Push, RevokeLease, SendComplete, SendDone
from tests.unit.transport.agents import ALL, BLOCKS, BYTES, END, LAYERS, edge, opening, rank, step
from tests.unit.transport.ranks import content, expected_after

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("sender_staged", "receiver_staged"), [(True, True), (True, False), (False, True)])
def test_a_forward_pass_is_sent_layer_by_layer_through_buffers(sender_staged: bool, receiver_staged: bool) -> None:
    targets = tuple(reversed(ALL))
    with edge() as inbox, rank(1, staged=sender_staged) as source, rank(2, staged=receiver_staged) as target:
        expected = expected_after(content(target.region), source.region, ALL, targets)
        lease = target.grant(inbox.address, targets)
        begun = opening("s", lease, inbox.address, target.addresses)
        step(source.agent, [begun], [Push("s", 0, ALL)], [SendComplete("s", 0, END)])
        while not isinstance(done := inbox.next(), SendDone):
            pass  # how far the lease is filled, as often as time allows
        assert (done.error, done.transport, done.bytes) == (None, "tcp", LAYERS * BLOCKS * BYTES)
        assert target.order(RevokeLease(lease)) == END
        assert content(target.region) == expected


def test_a_transport_that_reads_memory_is_refused_at_the_start() -> None:
    with pytest.raises(EngineError, match="cannot read"), rank(1, TransportSettings("host"), staged=True):
        pytest.fail("it started")
