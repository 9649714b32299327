"""Bodies of requests that a proxy reads whole: each has a limited size, and all together have a limit."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tercet.fleet.bodies import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.protocol import RequestTooLarge
from tercet_gateway.sidecar.listener import ClientCall


class RequestBodies:
    """All buffered bodies of one process, each of at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = BodiesHeld(LARGEST_AT_ONCE * most)

    @property
    def size(self) -> int:
        """Bytes of all buffered bodies."""
        return self._held.size

    def one(self) -> AbstractContextManager[HeldBody]:
        """Return a context for one body, which is dropped at its exit."""
        return self._held.one()

    def announced(self, http: ClientCall) -> int | None:
        """Return the length in bytes that a request announces; None if it announces none.

        Raises :class:`~tercet.protocol.RequestTooLarge`.
        """
        announced = http.header("content-length") or ""
        length = int(announced) if announced.isdecimal() else None
        if length is not None and length > self._most:
            raise self._too_large()
        return length

    async def read(self, http: ClientCall, body: HeldBody) -> None:
        """Read the whole body; the caller forgets it once it was passed on.

        Raises :class:`~tercet.protocol.RequestTooLarge`, :class:`~tercet.protocol.Saturated` if all bodies together
        exceed their limit, and the errors of :meth:`~tercet_gateway.sidecar.listener.ClientCall.parts`.
        """
        self.announced(http)
        await http.expected()
        async with body.until_let_go():
            async for chunk in http.parts():
                if body.size + len(chunk) > self._most:
                    raise self._too_large()
                body.take(chunk)
        body.end()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request's body has more than {self._most} bytes (--max-request-bytes)")
