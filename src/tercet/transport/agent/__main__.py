"""``python -m tercet.transport.agent DESCRIPTOR``: what :class:`.agent_process.AgentProcess` starts."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from tercet.transport.agent.agent import run

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run until the worker is gone; its Ctrl-C is not ours."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s tercet-kv %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The channel's end tells as much, but not to a process that is stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    run(int(sys.argv[1]))
    # Threads that wait in a backend's library must not hold the exit up.
    os._exit(0)


if __name__ == "__main__":
    main()
