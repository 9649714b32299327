"""What KV peers say to each other: a sender's greeting and messages, a receiver's answers and requests for chunks."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import Any

import msgspec
import numpy as np

from tercet.protocol import TercetError
from tercet.transport import BlockShape, HeadSlice, KVRegion, SendReport, TransportSettings
from tercet.transport.backends import tcp
from tercet.transport.inbound import Pace, SenderSession
from tercet.transport.local_rank import LocalRank, agree, chosen, greet, require_ours
from tercet.transport.peer import RankSend, TransferPeer
from tercet.transport.peer_messages import (
    FROM_RECEIVER,
    FROM_SENDER,
    HEADER_BYTES,
    Acknowledged,
    Challenge,
    Greeting,
    MessageSplitter,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    Refused,
    Welcome,
    framed,
    proof_of,
)
from tercet.transport.sockets import wait_in_calls
from tests.fuzz.fuzzing import Outcome, Target
from tests.fuzz.mutation import Case, MessagePack, pieces
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    FINGERPRINT,
    LAYERS,
    LEASE,
    NONCE,
    OTHER_LEASE,
    SECRET,
    SIZE,
    Conversation,
    Receiving,
    chunk,
    fin,
    sending_region,
)
from tests.unit.transport.models import a_grant, whose

LEASED = {(layer, block) for layer in range(LAYERS) for block in (5, 2, 3)}
OURS, THEIRS = BlockShape(16, 1, 2, 1), BlockShape(8, 1, 2, 1)
FRAMES = MessagePack(HEADER_BYTES, lambda body: framed(msgspec.Raw(body)))  # type: ignore[arg-type]


def random_of(case: Case) -> Random:
    """Choices that follow from a case: the same each time it is run."""
    return Random(hashlib.sha256(b"".join(case)).digest())


def kind_of(error: BaseException) -> str:
    """An error as its kind and words, without what differs from case to case."""
    words = "".join(char for char in str(error)[:60] if not char.isdigit())
    return f"{type(error).__name__} {words}"


# ---- a sender --------------------------------------------------------------------------------------------------------


class SendersRoom:
    """A receiver, and senders that say what a case holds: the first item is a greeting, the others come behind it."""

    def __init__(self, ours: BlockShape | None, theirs: BlockShape | None) -> None:
        self._ours = ours
        self._sender = sending_region() if theirs is None else sending_region(theirs.block_bytes)
        self._receiving = Receiving(block=ours)
        self._number = 0
        self._lease = LEASE

    async def run(self, case: Case) -> Outcome:
        receiving = self._receiving
        before = receiving.snapshot()
        conversation = Conversation(receiving, self._sender, greet=False)
        happened = [self._converse(conversation, case)]
        for answer in conversation.answers:
            assert isinstance(answer, Acknowledged | Refused), answer
            reason = "".join(char for char in getattr(answer, "reason", "") if char.isalpha() or char == " ")
            happened.append(f"{type(answer).__name__} {reason[:60]}")
        assert receiving.touched(before) <= LEASED, "bytes outside of the lease's blocks were written"
        assert receiving.grants.receives == 0, "a session that is over has sends under a lease"
        assert all(value >= 0 for value in receiving.rank.counters.read().values())
        self._take_back(happened)
        return Outcome(len(case), " | ".join(happened[:4]))

    def _converse(self, conversation: Conversation, case: Case) -> str:
        receiving, splitter, random = self._receiving, MessageSplitter(FROM_SENDER), random_of(case)
        session: SenderSession | None = None
        try:
            for item in case:
                for data in pieces(random, item):
                    messages = splitter.feed(data)
                    if session is None:
                        session = self._greeted(conversation, messages)
                    if session is not None:
                        session.take(messages)
                        session.settle()
            return "taken" if session is not None else "no greeting"
        except ProtocolViolation as error:
            return kind_of(error)
        finally:
            if session is not None:
                session.close()
            receiving.backends.clear()

    def _greeted(self, conversation: Conversation, messages: Any) -> SenderSession | None:
        receiving = self._receiving
        for message in messages:
            if not isinstance(message, Greeting):
                raise ProtocolViolation("the first message must be a greeting")
            require_ours(receiving.rank, conversation.challenge, message)
            agreed = agree(receiving.rank, conversation.challenge, message, None)
            assert agreed.welcome.transport in message.offers
            say = conversation.answers.append
            return SenderSession(receiving.rank, receiving.grants, agreed, Pace(), lambda *_: None, say)
        return None

    def _take_back(self, happened: list[str]) -> None:
        """End the lease: what it says is valid was all written. Another lease follows, for the next case."""
        receiving, size = self._receiving, SIZE if self._ours is None else self._ours.tokens
        valid_end = receiving.grants.revoke(self._lease)
        assert valid_end is not None, "the lease was open"
        assert 0 <= valid_end <= 3 * size
        happened.append(f"valid to {valid_end}")
        assert len(receiving.grants) == 0
        for layer in range(LAYERS):
            for block in (5, 2, 3)[: valid_end // size]:
                assert b"\xee" not in receiving.block(layer, block), "what is valid was not all written"
            for block in (5, 2, 3):
                receiving.region.blocks(layer, block)[:] = b"\xee" * receiving.region.shape.block_bytes
        receiving.grants = type(receiving.grants)(LAYERS)
        receiving.grants.grant(a_grant(LEASE, (5, 2, 3), 0, 3 * size, size))


def _senders(
    ours: BlockShape | None, theirs: BlockShape | None
) -> Callable[[], AbstractAsyncContextManager[SendersRoom]]:
    @asynccontextmanager
    async def room() -> AsyncGenerator[SendersRoom]:
        yield SendersRoom(ours, theirs)

    return room


def _sender_cases(ours: BlockShape | None, theirs: BlockShape | None) -> list[Case]:
    sender = sending_region() if theirs is None else sending_region(theirs.block_bytes)
    conversation = Conversation(Receiving(block=ours), sender, greet=False)
    hello = conversation.hello(block=theirs)
    greeting = framed(hello)
    size = BLOCK_BYTES if theirs is None else theirs.block_bytes
    slots = [0, 1, 2] if theirs is None else [0, 1, 2, 3, 4, 5]
    tokens = 3 * SIZE
    plain = [framed(chunk(layer, 0, slots, size=size)) for layer in range(LAYERS)]
    slot_by_slot = [framed(chunk(layer, slot, [7 - slot], size=size)) for slot in slots for layer in range(LAYERS)]
    halves = [
        framed(chunk(layer, 0, slots, send=2 + part, offset=part * size // 2, size=size // 2, part=part, parts=2))
        for part in range(2)
        for layer in range(LAYERS)
    ]
    several = [framed(chunk(0, 0, slots, send=8, size=size, layers=LAYERS))]
    streams = framed(msgspec.structs.replace(hello, stream=1))
    return [
        [greeting, *plain, framed(fin(0, tokens, LAYERS))],
        [greeting, *slot_by_slot, framed(fin(0, tokens, len(slot_by_slot)))],
        [greeting, framed(fin(0, tokens, LAYERS)), *plain],
        [greeting, *halves, *(framed(fin(0, tokens, LAYERS, send=2 + part, part=part, parts=2)) for part in range(2))],
        [greeting, *several, framed(fin(0, tokens, 1, send=8)), *plain, framed(fin(0, tokens, LAYERS))],
        [greeting, *plain[:1], framed(chunk(1, 0, slots, send=3, lease=OTHER_LEASE, size=size)), *plain[1:]],
        [greeting + b"".join(plain) + framed(fin(0, tokens, LAYERS))],
        [greeting, streams, greeting],
        [streams],
    ]


# ---- a receiver's answers --------------------------------------------------------------------------------------------


class AnswersRoom:
    """A sender's session without sockets, which hears what a case holds: a challenge and a welcome, then answers."""

    def __init__(self) -> None:
        self._region = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
        self._region.close()
        settings = TransportSettings(secret=SECRET, timeout=1.0)
        self._rank = LocalRank(self._region, FINGERPRINT, settings, [tcp.TcpBackend()])

    async def run(self, case: Case) -> Outcome:
        outcomes: dict[int, list[SendReport | TercetError]] = {}
        peer = TransferPeer(["tcp://127.0.0.1:1"], self._rank, lambda _: None)
        sends: list[RankSend] = []
        for number in range(1, 4):
            heard = outcomes.setdefault(number, [])
            send = RankSend(LEASE, whose(0), HeadSlice(0, BLOCK_BYTES), heard.append, number)
            assert peer.open(send)
            send.chunks.append(chunk(0, 0, [1, 2], send=number))
            if number < 3:
                send.finished_at = 0.0
            sends.append(send)
        happened = self._hear(peer, case)
        peer._break(ConnectionResetError("over"))
        for number, heard in outcomes.items():
            assert len(heard) == 1, f"send {number} ended {len(heard)} times"
            assert not self._region.has_word(number), "the blocks of a send that is over are pinned"
        assert not isinstance(outcomes[3][0], SendReport), "what was not complete was acknowledged"
        happened += "".join("-+"[isinstance(heard[0], SendReport)] for heard in outcomes.values())
        return Outcome(len(case), happened)

    def _hear(self, peer: TransferPeer, case: Case) -> str:
        splitter, greeting, random = MessageSplitter(FROM_RECEIVER), None, random_of(case)
        challenge = Challenge(b"")
        welcomed = False
        try:
            for item in case:
                for data in pieces(random, item):
                    for message in splitter.feed(data):
                        if greeting is None:
                            if not isinstance(message, Challenge):
                                raise ProtocolViolation("no challenge")
                            said = greet(self._rank, message, "a", 0, {"tcp": b""}, 1)
                            greeting = msgspec.structs.replace(said, nonce=NONCE)
                            challenge = message
                        elif not welcomed:
                            if not isinstance(message, Welcome):
                                raise ProtocolViolation("no welcome")
                            assert chosen(self._rank, challenge, greeting, message) == "tcp"
                            welcomed = True
                        else:
                            peer._answered(message)
            return "heard"
        except ProtocolViolation as error:
            return kind_of(error)


@asynccontextmanager
async def _answers() -> AsyncGenerator[AnswersRoom]:
    yield AnswersRoom()


def _answer_cases() -> list[Case]:
    challenge = Challenge(NONCE)
    begin = [framed(challenge), framed(Welcome("tcp", proof_of("receiver", SECRET, NONCE, NONCE, "a")))]
    return [
        [*begin, framed(Acknowledged(1)), framed(Acknowledged(2))],
        [*begin, framed(Refused(2, "no more")), framed(Acknowledged(1)), framed(Acknowledged(1))],
        [*begin, framed(Refused(3, "the lease has ended")), framed(Refused(0, "closed"))],
        [b"".join([*begin, framed(Acknowledged(1))])],
        [framed(Refused(0, "secret"))],
    ]


# ---- a receiver's requests for chunks --------------------------------------------------------------------------------


class RequestsRoom:
    """The sender's side of a connection over which a receiver asks for chunks."""

    def __init__(self) -> None:
        self._region = sending_region()
        self._rank = LocalRank(self._region, FINGERPRINT, TransportSettings(), [tcp.TcpBackend()])
        self._peer = TransferPeer(["tcp://127.0.0.1:1"], self._rank, lambda _: None)
        self._send = RankSend(LEASE, whose(0), HeadSlice(0, BLOCK_BYTES), lambda _: None, 1)
        assert self._peer.open(self._send)
        offered = [chunk(0, 0, [1, 2]), chunk(1, 0, [5]), chunk(0, 0, [6, 3], offset=16, size=16)]
        self._send.chunks += offered
        self._answers = [self._bytes_of(each) for each in offered]

    def _bytes_of(self, of: ReadDescriptors) -> bytes:
        word = tcp.WORD.pack(1)
        blocks = np.frombuffer(of.blocks, "<i8").tolist()
        found = b"".join(
            bytes(self._region.blocks(of.layer, block))[of.offset : of.offset + of.size] for block in blocks
        )
        return word + found + word

    async def run(self, case: Case) -> Outcome:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            wait_in_calls(ours, 0.5, 0.5)
            theirs.setblocking(False)
            happened = "closed"
            try:
                theirs.sendall(b"".join(case)[:100_000])
                theirs.shutdown(socket.SHUT_WR)
                tcp.serve(ours, self._region, self._peer._reading)
            except (ProtocolViolation, OSError) as error:
                happened = kind_of(error)
            ours.close()
            said = _all_of(theirs)
        assert not self._send.readers
        while said:
            known = [answer for answer in (*self._answers, tcp.WORD.pack(0)) if said.startswith(answer)]
            if not known:
                assert any(answer.startswith(said) for answer in self._answers), "bytes that nobody was offered"
                break
            happened += f" {len(known[0])}"
            said = said[len(known[0]) :]
        return Outcome(len(case), happened[:100])


def _all_of(sock: socket.socket) -> bytes:
    found = b""
    try:
        while data := sock.recv(65536):
            found += data
    except (BlockingIOError, ConnectionResetError):
        return found
    return found


@asynccontextmanager
async def _requests() -> AsyncGenerator[RequestsRoom]:
    yield RequestsRoom()


def _request_cases() -> list[Case]:
    known = [framed(ReadRequest(1, 0, 128)), framed(ReadRequest(1, 1, 64)), framed(ReadRequest(1, 2, 32))]
    over = framed(ReadRequest(9, 0, 128))
    return [known, [known[1], over, known[0]], [b"".join(known)], [framed(ReadRequest(1, 3, 64))]]


TARGETS = (
    Target("kv_sender", lambda: _sender_cases(None, None), FRAMES, _senders(None, None)),
    Target("kv_sender_of_other_blocks", lambda: _sender_cases(OURS, THEIRS), FRAMES, _senders(OURS, THEIRS)),
    Target("kv_receiver", _answer_cases, FRAMES, _answers),
    Target("kv_requests", _request_cases, FRAMES, _requests),
)
