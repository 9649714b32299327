"""One sequence that decodes here, from its acceptance to the end."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tercet.protocol import Output, TercetError, Usage
from tercet.protocol.wire import Destination
from tercet.streams import Connection, Voice
from tercet.vllm_plugin.generation import Generation


class Decoding:
    """A generation, and what must be given back when it is over: ``on_end`` is called once, with whether it began.

    ``usage`` makes the first output's usage from the number of tokens that were found in the cache.
    """

    def __init__(
        self, generation: Generation, usage: Callable[[int], Usage], on_end: Callable[[bool], None]
    ) -> None:  # fmt: skip
        self.generation = generation
        self._usage = usage
        self._on_end = on_end
        self._begun = False
        self._over = False

    def told(self, output: Output) -> Output:
        """The output as callers get it."""
        if self._begun:
            return output
        self._begun = True
        return msgspec.structs.replace(output, usage=self._usage(self.generation.num_cached))

    def end(self) -> None:
        """Give back what the sequence took; more than once does nothing."""
        if not self._over:
            self._over = True
            self._on_end(self._begun)

    async def stream(self, connection: Connection, door: Destination, position: int) -> None:
        """Send outputs to a front door, until the last one, or until it does not want them any more.

        Returns once the engine has the request; raises :class:`~tercet.protocol.TercetError` if it has not.
        """
        try:
            voice = connection.voice(door.number, position, self._stop)
            try:
                await self.generation.start(lambda found: self._deliver(voice, found))
            except BaseException:
                voice.close()
                raise
        except BaseException:
            self.end()
            raise

    def _deliver(self, voice: Voice, found: Output | TercetError) -> None:
        if self._over:
            return  # stopped; what still comes is nobody's
        if isinstance(found, TercetError):
            self.end()
            voice.fail(found)
            return
        output = self.told(found)
        if output.finished:
            self.end()
        voice.say(output)

    def _stop(self) -> None:
        self.generation.abort()
        self.end()
