"""Runs sequences whose outputs go to front doors."""

from __future__ import annotations

import asyncio
import logging

from tercet.protocol import EngineError, OutputStream, TercetError
from tercet.protocol.wire import Destination
from tercet.streams.connection import Voice
from tercet.streams.speaker import Speaker

logger = logging.getLogger(__name__)


class Relay:
    """What an engine generates for front doors, each sequence in a task that ends when nobody listens any more."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, door: Destination, position: int, outputs: OutputStream) -> None:
        """Generate; ``position`` is that of the first token among the sequence's output. Errors go there, too.

        Returns once the front door is connected. Raises :class:`~tercet.protocol.FrontDoorUnreachable` if it is not to
        be reached, and :class:`~tercet.protocol.Conflict` if the sequence is over before it began.
        """
        connection = await self.speaker.connect(door.address, door.key)
        running: list[asyncio.Task[None]] = []
        voice = connection.voice(door.number, position, lambda: [task.cancel() for task in running])
        task = asyncio.get_running_loop().create_task(_run(voice, outputs))
        running.append(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all that runs, and every connection."""
        self.speaker.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _run(voice: Voice, outputs: OutputStream) -> None:
    try:
        await outputs.run(voice.say)
        voice.fail(EngineError("the engine ended the sequence without a finish reason"))
    except TercetError as error:
        voice.fail(error)
    except Exception as error:  # it fails its own sequence only
        logger.exception("a sequence failed")
        voice.fail(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
    finally:
        voice.close()
