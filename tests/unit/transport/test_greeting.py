"""Who may send, and how KV travels: what is said before the first chunk."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tercet.protocol import TransferFailed
from tercet.protocol.access import secrets_of
from tercet.transport import BlockShape, KVRegion
from tercet.transport.backends import BackendUnavailable
from tercet.transport.backends.reading import Batch, HostBackend, UnderLease
from tercet.transport.peer_messages import Challenge, ProtocolViolation
from tercet.transport.region import RegionShape
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    WORD,
    Conversation,
    FakeBackend,
    FakeReader,
    Receiving,
    chunk,
    sending_region,
)


def refused(talk: Conversation, why: str, **said: Any) -> None:
    """A violation, which leaves no session behind."""
    with pytest.raises(ProtocolViolation, match=why):
        talk.greet(**said)
    assert (talk.agreed, talk.answers) == (None, [])


# ---- who -------------------------------------------------------------------------------------------------------------


def test_a_sender_that_knows_the_secret_is_welcome() -> None:
    assert Conversation(greet=False).greet() == "fake"


@pytest.mark.parametrize("secret", ["", "another", "the-fleet", "the-fleets-"])
def test_another_secret(secret: str) -> None:
    refused(Conversation(greet=False), "secret", secret=secret)


@pytest.mark.parametrize(
    ("receiver", "sender"), [("a b", "a"), ("a b", "b"), ("b a", "a b"), ("a", "a b"), ("b", "b a")]
)
def test_two_secrets_are_valid_while_they_are_changed(receiver: str, sender: str) -> None:
    talk = Conversation(greet=False)
    rank = talk.receiving.rank
    talk.receiving.rank = replace(rank, settings=msgspec.structs.replace(rank.settings, secret=receiver))
    assert talk.greet(secret=secrets_of(sender)[0]) == "fake"


@pytest.mark.parametrize("changes", [{"proof": b""}, {"proof": bytes(32)}, {"nonce": b"x"}, {"session": "b"}], ids=str)
def test_a_proof_of_something_else(changes: dict[str, Any]) -> None:
    refused(Conversation(greet=False), "secret", **changes)


def test_a_greeting_that_was_heard_elsewhere() -> None:
    """Each connection has a challenge of its own."""
    first, second = Conversation(), Conversation(greet=False)
    second.challenge = Challenge(b"another")
    refused(second, "secret", proof=first.hello().proof)


def test_the_secret_comes_before_the_layout() -> None:
    refused(Conversation(greet=False), "secret", secret="another", fingerprint="other")
    refused(Conversation(greet=False), "layout", fingerprint="other")


# ---- blocks ----------------------------------------------------------------------------------------------------------

OURS = BlockShape(16, 2, 1, 1)


@pytest.mark.parametrize(
    "block", [BlockShape(0, 2, 1, 1), BlockShape(-3, 2, 1, 1), BlockShape(8, 2, 2, 1), BlockShape(8, 2, 1, 2)], ids=str
)
def test_blocks_that_cannot_be_put_together(block: BlockShape) -> None:
    refused(Conversation(Receiving(block=OURS), greet=False), "layout", block=block)


# ---- backends --------------------------------------------------------------------------------------------------------


def offering(theirs: KVRegion, *backends: FakeBackend, **changes: Any) -> Conversation:
    return Conversation(Receiving(backends), theirs, **changes)


def chosen(talk: Conversation) -> str:
    assert talk.agreed is not None
    return talk.agreed.welcome.transport


def test_the_first_backend_that_works_is_taken() -> None:
    theirs = sending_region()
    readers = [FakeReader(theirs), FakeReader(theirs)]
    good, better = (FakeBackend(reader, name) for reader, name in zip(readers, ("good", "better"), strict=True))
    broken = FakeBackend(BackendUnavailable("broken: it is"), "broken")
    talk = offering(theirs, broken, better, good)
    assert chosen(talk) == "better"
    assert (broken.asked, better.asked, good.asked) == ([(b"broken", theirs.shape)], [(b"better", theirs.shape)], [])
    talk.close()
    assert [reader.closed for reader in readers] == [0, 1]


@pytest.mark.parametrize(
    "error", [BackendUnavailable("not here"), TransferFailed("it broke"), OSError("the device is gone")], ids=repr
)
def test_the_next_one_is_taken_when_a_backend_does_not_work(error: Exception) -> None:
    theirs = sending_region()
    last = FakeBackend(FakeReader(theirs), "last")
    assert chosen(offering(theirs, FakeBackend(error), last)) == "last"


@pytest.mark.parametrize("changes", [{"word": 0}, {"word": WORD + 1}, {"word": 2**62}, {"offers": {"x": b""}}], ids=str)
def test_memory_that_cannot_be_tried_is_not_read(changes: dict[str, Any]) -> None:
    theirs = sending_region()
    backend = FakeBackend(reader := FakeReader(theirs))
    with pytest.raises(ProtocolViolation, match="no transport that both sides allow works: fake"):
        offering(theirs, backend, **changes)
    assert reader.closed == len(backend.asked)


@pytest.mark.parametrize(
    "shape", [None, RegionShape((0,), 1, 64, 0, 64), RegionShape((-64,), 1, 64, 0, 2**40)], ids=str
)
def test_a_region_that_does_not_hold_its_blocks_is_not_read(shape: RegionShape | None) -> None:
    backend = FakeBackend(FakeReader(sending_region()))
    with pytest.raises(ProtocolViolation, match="region"):
        offering(sending_region(), backend, shape=shape)
    assert backend.asked == []


def test_a_reader_that_fails_its_check_is_closed() -> None:
    class Broken(FakeReader):
        def read(self, batch: Batch, under_lease: UnderLease) -> bool:
            raise OSError("the sender is gone")

    theirs = sending_region()
    reader = Broken(theirs)
    assert chosen(offering(theirs, FakeBackend(reader), FakeBackend(FakeReader(theirs), "last"))) == "last"
    assert reader.closed == 1


def test_no_way_at_all_says_why() -> None:
    theirs = sending_region()
    backends = FakeBackend(BackendUnavailable("fake: no device")), FakeBackend(FakeReader(theirs), "other")
    with pytest.raises(ProtocolViolation, match="fake: no device; other: the sender does not offer it"):
        offering(theirs, *backends, offers={"fake": b""})


# ---- the host backend ------------------------------------------------------------------------------------------------


def hosted(theirs: KVRegion, memory: int | None, **changes: Any) -> Conversation:
    receiving = Receiving()
    receiving.backends.append(HostBackend(theirs))
    return Conversation(receiving, theirs, memory=memory, **changes)


def test_memory_that_came_with_the_greeting_is_mapped() -> None:
    theirs = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
    theirs.set_word(WORD)
    theirs.set_word(1)
    theirs.blocks(0, 6)[:] = bytes(range(BLOCK_BYTES))
    talk = hosted(theirs, theirs.fd)
    assert chosen(talk) == "host"
    assert talk.say(chunk(0, 1, [6])) == []
    assert talk.receiving.block(0, 2) == bytes(range(BLOCK_BYTES))
    assert talk.receiving.touched() == {(0, 2)}
    shape = theirs.shape
    larger = RegionShape(shape.planes, shape.num_blocks, shape.block_bytes, shape.words, shape.size + 8)
    for memory, changes in ((None, {}), (theirs.fd, {"shape": larger}), (os.open(os.devnull, os.O_RDONLY), {})):
        with pytest.raises(ProtocolViolation, match="host: the sender's memory"):
            hosted(theirs, memory, **changes)
    theirs.close()
