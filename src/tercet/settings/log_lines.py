"""Where Tercet's own log lines go, in processes that run other people's libraries as well."""

from __future__ import annotations

import logging

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
TIME = "%m-%d %H:%M:%S"


def log_to_stderr(level: str) -> None:
    """Write Tercet's log lines from ``level`` on to standard error; the first who calls this decides.

    By a handler of their own: a library that vLLM imports sets the root logger, with its handlers, to errors alone.
    """
    logger = logging.getLogger("tercet")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, TIME))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
