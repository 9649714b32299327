"""Who may send, and how KV travels: what is said before the first piece."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import BlockShape, KVRegion
from tercet.transport.backends import BackendUnavailable
from tercet.transport.backends.host import HostBackend
from tercet.transport.frames import MAX_GREETING_BYTES, Header, Kind, ProtocolViolation, frame
from tercet.transport.region import RegionShape
from tercet.transport.session import MAX_STREAMS
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    Conversation,
    FakeBackend,
    FakeReader,
    Receiving,
    fin,
    piece,
    reference,
)

WORD = 77


@pytest.fixture
def theirs() -> Iterator[KVRegion]:
    """The sender's region."""
    region = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
    region.begin(WORD)
    yield region
    region.close()


def refused(talk: Conversation, said: bytes, why: str) -> None:
    """A violation, which leaves no session and no answer behind."""
    before = len(talk.receiving.rules.sessions)
    with pytest.raises(ProtocolViolation, match=why):
        talk.say(said)
    talk.inbound.close()
    assert (talk.inbound.session, len(talk.receiving.rules.sessions)) == (None, before)
    assert talk.answers == []


# ---- who -----------------------------------------------------------------------------------------------------


def test_a_sender_that_knows_the_secret_is_welcome() -> None:
    talk = Conversation(greet=False)
    assert talk.say(talk.hello()) == [(Kind.WELCOME, 0)]
    assert talk.welcome() == "tcp"


@pytest.mark.parametrize("secret", ["", "another", "the fleet's "])
def test_another_secret(secret: str) -> None:
    talk = Conversation(greet=False)
    refused(talk, talk.hello(secret), "secret")


@pytest.mark.parametrize("changes", [{"proof": b""}, {"proof": bytes(32)}, {"nonce": b"x"}, {"session": "b"}], ids=str)
def test_a_proof_of_something_else(changes: dict[str, Any]) -> None:
    talk = Conversation(greet=False)
    refused(talk, talk.hello(**changes), "secret")


def test_a_greeting_that_was_heard_elsewhere() -> None:
    """Each connection has a challenge of its own."""
    first = Conversation()
    second = Conversation(greet=False, session="a")
    refused(second, first.hello(), "secret")


def test_the_secret_comes_before_the_layout() -> None:
    talk = Conversation(greet=False)
    refused(talk, talk.hello("another", fingerprint="other"), "secret")
    talk = Conversation(greet=False)
    refused(talk, talk.hello(fingerprint="other"), "layout")


@pytest.mark.parametrize("said", [piece(0, 0, 1, 1), reference(0, 0, [1]), fin(0, 48, 0)], ids=["piece", "ref", "fin"])
def test_nothing_comes_before_the_greeting(said: bytes) -> None:
    talk = Conversation(greet=False)
    refused(talk, said, "HELLO")
    assert talk.receiving.touched() == set()


def test_a_greeting_comes_once() -> None:
    talk = Conversation()
    with pytest.raises(ProtocolViolation, match="no other"):
        talk.say(talk.hello())


@pytest.mark.parametrize("nbytes", [0, MAX_GREETING_BYTES + 1, 2**64 - 1])
def test_a_greeting_has_a_reasonable_length(nbytes: int) -> None:
    refused(Conversation(greet=False), Header(Kind.HELLO, nbytes=nbytes).pack(), f"HELLO of {nbytes} bytes")


@pytest.mark.parametrize("body", [b"\x95\xa2\xff\xfe\xa1a\x00\xc4\x00\xc4\x00", b"\x91" * 5000, b"\x00"])
def test_a_greeting_that_cannot_be_read(body: bytes) -> None:
    refused(Conversation(greet=False), frame(Header(Kind.HELLO), body), "Greeting")


# ---- sessions ------------------------------------------------------------------------------------------------


def test_a_session_begins_once() -> None:
    first = Conversation()
    second = Conversation(first.receiving, greet=False)
    refused(second, second.hello(), "begins once")


@pytest.mark.parametrize("stream", [1, -1, MAX_STREAMS, 2**63])
def test_a_stream_needs_its_session(stream: int) -> None:
    talk = Conversation(greet=False)
    refused(talk, talk.hello(stream=stream), "no such session")


# ---- blocks --------------------------------------------------------------------------------------------------

OURS = BlockShape(16, 2, 1, 1)


@pytest.mark.parametrize(
    "block", [BlockShape(0, 2, 1, 1), BlockShape(-3, 2, 1, 1), BlockShape(8, 2, 2, 1), BlockShape(8, 2, 1, 2)], ids=str
)
def test_blocks_that_cannot_be_put_together(block: BlockShape) -> None:
    talk = Conversation(Receiving(block=OURS), greet=False)
    refused(talk, talk.hello(block=block), "layout")


def test_blocks_of_another_size_come_over_tcp(theirs: KVRegion) -> None:
    receiving = Receiving(block=OURS)
    receiving.rules.backends = [FakeBackend(FakeReader(receiving.region, theirs))]
    talk = Conversation(receiving, greet=False)
    talk.say(talk.hello(block=BlockShape(8, 2, 1, 1), shape=theirs.shape, word=WORD, offers={"fake": b"", "tcp": b""}))
    assert talk.welcome() == "tcp"


# ---- backends ------------------------------------------------------------------------------------------------


def offering(theirs: KVRegion, *backends: FakeBackend, **changes: Any) -> Conversation:
    talk = Conversation(Receiving(backends), greet=False)
    offers = {backend.name: backend.name.encode() for backend in backends}
    said: dict[str, Any] = {"shape": theirs.shape, "word": WORD, "offers": {**offers, "tcp": b""}}
    talk.say(talk.hello(**{**said, **changes}))
    return talk


def test_the_first_backend_that_works_is_taken(theirs: KVRegion) -> None:
    readers = [FakeReader(theirs, theirs), FakeReader(theirs, theirs)]
    good, better = (FakeBackend(reader, name) for reader, name in zip(readers, ("good", "better"), strict=True))
    broken = FakeBackend(BackendUnavailable("broken: it is"), "broken")
    talk = offering(theirs, broken, better, good)
    assert talk.welcome() == "better"
    assert (broken.asked, better.asked, good.asked) == ([(b"broken", theirs.shape)], [(b"better", theirs.shape)], [])
    talk.inbound.close()
    assert [reader.closed for reader in readers] == [0, 1]


@pytest.mark.parametrize(
    "error", [BackendUnavailable("not here"), TransferFailed("it broke"), OSError("the device is gone")], ids=repr
)
def test_tcp_is_taken_when_no_backend_works(theirs: KVRegion, error: Exception) -> None:
    assert offering(theirs, FakeBackend(error)).welcome() == "tcp"


@pytest.mark.parametrize(
    "changes",
    [
        {"word": 0},
        {"word": WORD + 1},
        {"word": 2**64 - 1},
        {"word": -1},
        {"shape": None},
        {"offers": {"tcp": b""}},
        {"shape": RegionShape((0,), 1, 64, 0, 64)},
        {"shape": RegionShape((-64,), 1, 64, 0, 2**40)},
    ],
    ids=str,
)
def test_memory_that_cannot_be_tried_is_not_read(theirs: KVRegion, changes: dict[str, Any]) -> None:
    backend = FakeBackend(FakeReader(theirs, theirs))
    talk = offering(theirs, backend, **changes)
    assert talk.welcome() == "tcp"
    reader = backend.reader
    assert isinstance(reader, FakeReader)
    assert reader.closed == len(backend.asked)
    with pytest.raises(ProtocolViolation, match="REFERENCE"):
        talk.say(reference(0, 0, [1]))


def test_a_reader_that_fails_its_check_is_closed(theirs: KVRegion) -> None:
    class Broken(FakeReader):
        def word(self, there: int) -> int:
            raise OSError("the sender is gone")

    reader = Broken(theirs, theirs)
    assert offering(theirs, FakeBackend(reader)).welcome() == "tcp"
    assert reader.closed == 1


def test_no_way_at_all_says_why(theirs: KVRegion) -> None:
    talk = Conversation(Receiving([FakeBackend(BackendUnavailable("fake: no device"))], tcp_allowed=False), greet=False)
    said = talk.hello(shape=theirs.shape, word=WORD, offers={"fake": b"", "tcp": b""})
    refused(talk, said, "fake: no device; tcp: not allowed")


def test_a_taken_name_closes_the_reader(theirs: KVRegion) -> None:
    first = offering(theirs, FakeBackend(FakeReader(theirs, theirs)))
    reader = FakeReader(theirs, theirs)
    first.receiving.rules.backends = [FakeBackend(reader)]
    second = Conversation(first.receiving, greet=False)
    refused(second, second.hello(shape=theirs.shape, word=WORD, offers={"fake": b""}), "begins once")
    assert reader.closed == 1


# ---- the host backend ----------------------------------------------------------------------------------------


def hosted(theirs: KVRegion, offer: bytes, *, holds: bool, **changes: Any) -> Conversation:
    receiving = Receiving()
    receiving.rules.backends = [HostBackend(receiving.region)]
    talk = Conversation(receiving, greet=False)
    talk.holds = lambda pid: holds and pid == os.getpid()
    said: dict[str, Any] = {"shape": theirs.shape, "word": WORD, "offers": {"host": offer, "tcp": b""}}
    talk.say(talk.hello(**{**said, **changes}))
    return talk


def test_the_memory_of_a_process_that_holds_the_connection_is_mapped(theirs: KVRegion) -> None:
    offer = HostBackend(theirs).offer()
    theirs.blocks(0, 6)[:] = bytes(range(BLOCK_BYTES))
    theirs.begin(1)
    talk = hosted(theirs, offer, holds=True)
    assert talk.welcome() == "host"
    assert talk.say(reference(0, 1, [6])) == []
    assert talk.receiving.block(0, 2) == bytes(range(BLOCK_BYTES))
    assert talk.receiving.touched() == {(0, 2)}
    assert hosted(theirs, offer, holds=False).welcome() == "tcp"


def test_what_must_not_be_mapped(theirs: KVRegion, tmp_path: os.PathLike[str]) -> None:
    offer, shape = HostBackend(theirs).offer(), theirs.shape
    larger = RegionShape(shape.planes, shape.num_blocks, shape.block_bytes, shape.live, shape.size + 8)
    assert hosted(theirs, offer, holds=True, shape=larger).welcome() == "tcp"
    assert hosted(theirs, b"\xc1", holds=True).welcome() == "tcp"
    path = os.path.join(tmp_path, "unsealed")
    with open(path, "wb+") as file:
        file.truncate(shape.size)
        unsealed = dataclasses.make_dataclass("Unsealed", ["fd"])(file.fileno())
        assert hosted(theirs, HostBackend(unsealed).offer(), holds=True).welcome() == "tcp"
