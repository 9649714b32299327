"""The command line: ``tercet up | engine | router | demo``."""

import signal

__all__ = ["main"]


def main() -> None:
    """Run the command line; this is the ``tercet`` script."""
    # The imports below take a moment, and there is nothing yet that Ctrl-C would have to stop or explain.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tercet.cli.app import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
