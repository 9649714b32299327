"""Valid messages made wrong: structure first, then bytes. A case is a list of items, each what a peer says at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import msgspec

Case = list[bytes]
MOST_ITEMS = 24
MOST_BYTES = 512 * 1024
INTEGERS = (
    0, 1, -1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 1023, 1024, 1025, 4095, 4096, 65535, 65536,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", "a", "\0", "..", "/", "~", "~nobody-here/x", "é", "\u202e", "\N{GRINNING FACE}", "0", "-1", "1e9", "null", "[]",
    "tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://:0", "unix-abstract:x", "http://[", "x" * 65, "x" * 257, "y" * 5000,
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff", b"\xff" * 8, b"\x80" * 9, bytes(16), b"x" * 4097)


class Codec(Protocol):
    """How an item becomes a tree of plain values, and back."""

    def tree(self, item: bytes) -> Any:
        """Raises for what is no message."""
        ...

    def item(self, tree: Any) -> bytes:
        """Raises for what no message can hold."""
        ...


class MessagePack:
    """MessagePack, behind a header that ``framed`` puts before the body; ``header`` is how long that is."""

    def __init__(self, header: int = 0, framed: Callable[[bytes], bytes] = lambda body: body) -> None:
        self._header, self._framed = header, framed

    def tree(self, item: bytes) -> Any:
        return msgspec.msgpack.decode(item[self._header :])

    def item(self, tree: Any) -> bytes:
        return self._framed(msgspec.msgpack.encode(tree))


class Json:
    """JSON alone."""

    def tree(self, item: bytes) -> Any:
        return msgspec.json.decode(item)

    def item(self, tree: Any) -> bytes:
        return msgspec.json.encode(tree)


class Named:
    """A word, a space, and JSON."""

    def tree(self, item: bytes) -> Any:
        word, _, body = item.partition(b" ")
        return [word.decode(), Json().tree(body)]

    def item(self, tree: Any) -> bytes:
        word, body = tree
        return str(word).encode() + b" " + Json().item(body)


class Mutator:
    """Makes cases of ``seeds``; what it does follows from ``random`` alone."""

    def __init__(self, random: Random, seeds: Sequence[Case], codec: Codec) -> None:
        self.random, self.codec = random, codec
        self._seeds = seeds
        self._items = [item for seed in seeds for item in seed]

    def case(self, pool: Sequence[Case] = ()) -> Case:
        """A new case, of a seed or of one of ``pool``; one of thirty is a seed as it is."""
        chosen = self.random.choice(pool) if pool and self.random.random() < 0.4 else self.random.choice(self._seeds)
        case = list(chosen)
        if self.random.random() < 1 / 30:
            return case
        for _ in range(self._few()):
            self._step(case)
        return case[:MOST_ITEMS]

    def _few(self) -> int:
        """1 in half of the cases, seldom more than 5."""
        count = 1
        while count < 8 and self.random.random() < 0.5:
            count += 1
        return count

    def _step(self, case: Case) -> None:
        choose = self.random
        if not case:
            case.append(choose.choice(self._items))
            return
        at = choose.randrange(len(case))
        match choose.randrange(16):
            case 0:
                case.insert(choose.randrange(len(case) + 1), case[at])  # twice, or once more later
            case 1:
                del case[at]
            case 2:
                other = choose.randrange(len(case))
                case[at], case[other] = case[other], case[at]
            case 3:
                case.insert(at, choose.choice(self._items))
            case 4:
                del case[at + 1 :]
            case 5 | 6 | 7:
                case[at] = self.bytes_of(case[at])
            case 8:
                case[at] = choose.randbytes(choose.randrange(1, 200))
            case _:
                case[at] = self.structure_of(case[at])

    # ---- structure ---------------------------------------------------------------------------------------------------

    def structure_of(self, item: bytes) -> bytes:
        """The same message with other values, or other bytes if it is none."""
        try:
            return self.codec.item(self._changed(self.codec.tree(item)))[:MOST_BYTES]
        # What is no message, and what no message can hold.
        except (TypeError, ValueError, OverflowError, RecursionError, AttributeError, msgspec.MsgspecError):
            return self.bytes_of(item)

    def _changed(self, tree: Any) -> Any:
        """One place in a tree, any that there is, is another one."""
        places = list(_places(tree))
        if not places:
            return self._other(tree, tree)
        parent, key = self.random.choice(places)
        match self.random.randrange(10):
            case 0 if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case 0:
                parent[self.random.choice(TEXTS)] = parent[key]
            case 1:
                del parent[key]
            case 2 if isinstance(parent, list):
                self.random.shuffle(parent)
            case 3:
                other, there = self.random.choice(places)
                parent[key] = copy.deepcopy(other[there])
            case 4 if isinstance(parent, list):
                parent.extend(copy.deepcopy(parent[key]) for _ in range(self.random.choice((1, 2, 17, 300))))
            case _:
                parent[key] = self._other(parent[key], tree)
        return tree

    def _other(self, value: Any, tree: Any) -> Any:
        """A value near to this one, or of another kind."""
        if self.random.random() < 0.3:
            return self.value()
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self.random.choice((value + 1, value - 1, -value, 2 * value, self.random.choice(INTEGERS)))
        if isinstance(value, float):
            return self.random.choice((-value, value * 1e9, self.random.choice(FLOATS)))
        if isinstance(value, str):
            return self.random.choice((value[:-1], value + value, value.upper(), self.random.choice(TEXTS)))
        if isinstance(value, bytes):
            return self.bytes_of(value)
        if isinstance(value, list):
            return self.random.choice((value[:-1], value + value, value[::-1], [value], []))
        return self.value() if value is not tree else [value]

    def value(self) -> Any:
        """Any plain value."""
        choose = self.random
        match choose.randrange(9):
            case 0:
                return None
            case 1:
                return choose.random() < 0.5
            case 2 | 3:
                return choose.choice(INTEGERS)
            case 4:
                return choose.choice(FLOATS)
            case 5:
                return choose.choice(TEXTS)
            case 6:
                return choose.choice(BYTES)
            case 7:
                return [choose.choice(INTEGERS) for _ in range(choose.choice((0, 1, 3, 100)))]
            case _:
                return _nested(choose.choice((1, 2, 40, 2000)), choose.random() < 0.5)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def bytes_of(self, item: bytes) -> bytes:
        """The same bytes, some of them flipped, left out, put in, doubled or cut off."""
        choose, data = self.random, bytearray(item)
        for _ in range(self._few()):
            at = choose.randrange(len(data) + 1)
            end = min(len(data), at + choose.choice((1, 2, 4, 8, 64)))
            match choose.randrange(7):
                case 0 | 1 if at < len(data):
                    data[at] ^= 1 << choose.randrange(8)
                case 2 if at < len(data):
                    data[at] = choose.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xDB, 0xDD, 0xDF, 0xFF))
                case 3:
                    data[at:at] = choose.randbytes(choose.choice((1, 4, 30)))
                case 4:
                    del data[at:end]
                case 5:
                    data[at:at] = data[at:end] * choose.choice((1, 2, 50))
                case _:
                    del data[at:]
        return bytes(data[:MOST_BYTES])


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value in a tree, as what it is in and its index or key there."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo and len(found) < 2000:
        node = todo.pop()
        keys = range(len(node)) if isinstance(node, list) else list(node) if isinstance(node, dict) else ()
        for key in keys:
            found.append((node, key))
            todo.append(node[key])
    return found


def _nested(depth: int, in_maps: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if in_maps else [value]
    return value


def pieces(random: Random, data: bytes) -> list[bytes]:
    """The bytes as a connection may bring them: cut anywhere."""
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 0, 1, 3))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
