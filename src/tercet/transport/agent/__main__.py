"""Program of the agent: :class:`.agent.AgentProcess` runs ``python -m tercet.transport.agent DESCRIPTOR``."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from tercet.transport.agent.agent import run

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run until the worker has ended; ignore Ctrl-C, which is meant for the worker."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s tercet-kv %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The end of the channel ends the agent, too, but not an agent that is stopped.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    run(int(sys.argv[1]))
    # Threads that wait in a backend's library must not delay the exit.
    os._exit(0)


if __name__ == "__main__":
    main()
