"""What happens to servers while their process has no free descriptor, said once.

A server then cannot accept connections, and each kind of server says so differently: uvloop accepts and closes them in
silence, asyncio logs a traceback for each place of the listener's backlog each second, gRPC and ZeroMQ wait.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tercet.aio.tasks import repeat

logger = logging.getLogger("tercet.descriptors")
LOOK_INTERVAL_S = 1.0
MISSING = errno.EMFILE, errno.ENFILE


class _Descriptors:
    """The last state that was logged: whether a descriptor was free."""

    def __init__(self) -> None:
        self._are_missing = False

    async def look(self) -> None:
        """Open a descriptor and close it again; log once that none is free, and once that some are free again."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in MISSING:
                self.are_missing()
            return
        if self._are_missing:
            self._are_missing = False
            logger.warning("descriptors are free again, and connections are accepted")

    def are_missing(self) -> None:
        """Log once that no descriptor is free."""
        if not self._are_missing:
            self._are_missing = True
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "all %d descriptors of this process are in use: new connections wait or are closed, until some are "
                "free again; raise the limit (ulimit -n)", most,
            )  # fmt: skip

    def heed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what an event loop reports: failed accepts count as missing descriptors, the rest is logged."""
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in MISSING:
            self.are_missing()
        elif "_start_serving" not in context["message"]:  # asyncio tries to accept again, but the listener is closed
            loop.default_exception_handler(context)


@asynccontextmanager
async def descriptors_watched() -> AsyncGenerator[None]:
    """Log once when no descriptor is free, instead of at each connection that cannot be accepted, while entered."""
    loop, descriptors = asyncio.get_running_loop(), _Descriptors()
    before = loop.get_exception_handler()
    loop.set_exception_handler(descriptors.heed)
    watching = asyncio.create_task(repeat(descriptors.look, LOOK_INTERVAL_S, "watch of descriptors"))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        watching.cancel()
        await asyncio.wait({watching})
