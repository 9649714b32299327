"""A lease as its rules tell it, with sets of tokens: slow and plain, to compare the grant table with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tercet.protocol import BadRequest, Content, TransferFailed, content_of, packed
from tercet.transport import Grant
from tercet.transport.grants import MAX_PARTS, MAX_SENDS, SendKey
from tercet.transport.peer_messages import ReadDescriptors, SendEnd

LEASE = "ab" * 16


def a_grant(lease: str, blocks: Sequence[int], begin: int, end: int, size: int) -> Grant:
    """Blocks for the tokens 0, 1, 2 and so on."""
    return Grant(lease, (tuple(blocks),), begin, end, size, packed(range(max(0, end))), None)


def whose(end: int) -> Content:
    """What KV of those tokens is of."""
    return content_of(packed(range(end)), None)


def chunk(
    layer: int, begin: int, end: int, part: int = 0, parts: int = 1, unit: int = 0, layers: int = 1, lease: str = LEASE
) -> ReadDescriptors:
    """What fills some slots of some layers; where its bytes come from does not matter to leases."""
    return ReadDescriptors(1, lease, 0, layer, layers, begin, end, part=part, parts=parts, unit=unit)


def ending(
    begin: int, end: int, chunks: int, part: int = 0, parts: int = 1, unit: int = 0, lease: str = LEASE
) -> SendEnd:
    """The end of a send."""
    return SendEnd(1, lease, begin, end, chunks, part, parts, unit)


@dataclass
class SendModel:
    """What of a send that fills some ``layers`` has arrived: (slot, layer) pairs, frames, and the claim."""

    kind: tuple[int, int, int]
    layers: range
    arrived: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    frames: int = 0
    claim: SendEnd | None = None


@dataclass
class LeaseModel:
    """An open lease; each method does, returns and raises what the table must."""

    grant: Grant
    num_layers: int
    fills: Mapping[SendKey, range] = field(default_factory=dict[SendKey, range])  # all layers, if it does not say
    sends: dict[SendKey, SendModel] = field(default_factory=dict[SendKey, SendModel])
    valid: dict[tuple[int, int, int], set[int]] = field(default_factory=dict[tuple[int, int, int], set[int]])

    def slots(self, unit: int) -> list[range]:
        """The tokens of each slot of a sender with blocks of ``unit`` tokens."""
        unit = unit or self.grant.block_size
        tokens = range(self.grant.begin, self.grant.begin + len(self.grant.blocks[0]) * self.grant.block_size)
        return [range(number * unit, (number + 1) * unit) for number in sorted({token // unit for token in tokens})]

    def require_inside(self, piece: ReadDescriptors) -> None:
        """What ``locate`` checks."""
        slots = range(len(self.slots(piece.unit)))
        inside = piece.begin in slots and piece.end - 1 in slots and piece.begin < piece.end
        if not (inside and piece.layer in range(self.num_layers) and piece.part in range(piece.parts)):
            raise BadRequest("outside")
        if piece.parts > MAX_PARTS:
            raise BadRequest("parts")

    def arrive(self, key: SendKey, piece: ReadDescriptors) -> int | None:
        """A piece that ``locate`` let pass."""
        send = self._send(key, (piece.part, piece.parts, piece.unit))
        if piece.layer not in send.layers:
            raise BadRequest("other layers")
        send.frames += 1
        send.arrived |= {(slot, piece.layer) for slot in range(piece.begin, piece.end)}
        return self._settle(key, send)

    def claim(self, key: SendKey, claim: SendEnd) -> int | None:
        """A claim."""
        if not (self.grant.begin <= claim.begin < claim.end <= self.grant.end):
            raise BadRequest("outside")
        send = self._send(key, (claim.part, claim.parts, claim.unit))
        if send.claim is not None:
            raise BadRequest("one claim")
        send.claim = claim
        return self._settle(key, send)

    def lose(self, key: SendKey) -> None:
        """A send that does not end."""
        send = self.sends.pop(key)
        part, parts, unit = send.kind
        for slot, held in enumerate(self.slots(unit)):
            if all((slot, layer) in send.arrived for layer in send.layers):
                tokens = {token for token in held if self.grant.begin <= token < self.grant.end}
                self._validate(send, parts, part, tokens)

    def valid_end(self) -> int:
        """As far as every token of every part is there in every layer, for one way to cut."""
        best = self.grant.begin
        for parts in {parts for parts, *_ in self.valid}:
            end = self.grant.begin
            needed = list(itertools.product([parts], range(parts), range(self.num_layers)))
            while all(end in self.valid.get(each, set()) for each in needed):
                end += 1
            best = max(best, end)
        return best

    def _validate(self, send: SendModel, parts: int, part: int, tokens: set[int]) -> None:
        for layer in send.layers:
            self.valid.setdefault((parts, part, layer), set()).update(tokens)

    def _send(self, key: SendKey, kind: tuple[int, int, int]) -> SendModel:
        part, parts, _ = kind
        if part not in range(parts) or parts > MAX_PARTS or (key in self.sends and self.sends[key].kind != kind):
            raise BadRequest("one part")
        if key not in self.sends and len(self.sends) >= MAX_SENDS:
            raise BadRequest("too many")
        return self.sends.setdefault(key, SendModel(kind, self.fills.get(key, range(self.num_layers))))

    def _settle(self, key: SendKey, send: SendModel) -> int | None:
        claim = send.claim
        if claim is None or send.frames < claim.chunks:
            return None
        del self.sends[key]
        tokens: set[int] = set()
        for slot, held in enumerate(self.slots(claim.unit)):
            if held.stop > claim.begin and held.start < claim.end:
                if any((slot, layer) not in send.arrived for layer in send.layers):
                    raise TransferFailed("missing")
                tokens |= {token for token in held if self.grant.begin <= token < claim.end}
        self._validate(send, claim.parts, claim.part, tokens)
        return self.valid_end()
