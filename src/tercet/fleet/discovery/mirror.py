"""Copy of a collection of the API server: a state machine without I/O that gets lists and lines of a watch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from tercet.fleet.discovery.api_objects import Marked, Metadata, Status, WatchEvent
from tercet.protocol.wire import UNREADABLE

GONE = 410


class HasMetadata(Protocol):
    """An object of the API server."""

    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=HasMetadata)


class WatchBroken(Exception):
    """Raised if a watch cannot continue, so that the collection must be listed again.

    Its input is invalid, or the server reports an error; ``code`` is the server's, or 0.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Mirror(Generic[T]):
    """Objects of one ``kind`` by name, as of ``version``, from which a watch continues.

    ``version`` is empty while a list is needed.
    """

    def __init__(self, kind: type[T]) -> None:
        self.version = ""
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[str, T] = {}

    @property
    def objects(self) -> Sequence[T]:
        """All objects in the order of their names."""
        return [self._objects[name] for name in sorted(self._objects)]

    def listed(self, objects: Iterable[T], version: str) -> None:
        """Replace all objects by the objects of a list as of ``version``."""
        self._objects = {each.metadata.name: each for each in objects}
        self.version = version

    def void(self) -> None:
        """Mark that a watch cannot continue from here; the objects stay until the next list."""
        self.version = ""

    def heard(self, line: bytes) -> bool:
        """Apply one event of a watch; return True if objects may have changed.

        Raises :class:`WatchBroken` for an invalid line and for an error of the server.
        """
        try:
            event = msgspec.json.decode(line, type=WatchEvent)
            match event.type:
                case "ADDED" | "MODIFIED":
                    found = self._decoder.decode(event.object)
                    self._objects[found.metadata.name] = found
                    self.version = found.metadata.resource_version
                    return True
                case "DELETED":
                    return self._deleted(self._decoder.decode(event.object).metadata)
                case "BOOKMARK":
                    self.version = msgspec.json.decode(event.object, type=Marked).metadata.resource_version
                    return False
                case "ERROR":
                    status = msgspec.json.decode(event.object, type=Status)
                    raise WatchBroken(status.message or status.reason or "an error without a message", status.code)
                case other:
                    raise WatchBroken(f"the watch sent an event of the unknown type {other!r}")
        except UNREADABLE as error:
            raise WatchBroken(f"the watch sent a line that is not an event: {error}") from error

    def _deleted(self, gone: Metadata) -> bool:
        """Delete an object unless another object of the same name has replaced it; return True if it was deleted."""
        self.version = gone.resource_version
        known = self._objects.get(gone.name)
        if known is None or known.metadata.uid != gone.uid:
            return False
        del self._objects[gone.name]
        return True
