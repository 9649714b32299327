"""The command line, such as ``tercet up``, ``tercet engine``, ``tercet router`` and ``tercet demo``."""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line; this is the ``tercet`` script."""
    # The imports below take a moment, and nothing has started yet that Ctrl-C must stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tercet.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
