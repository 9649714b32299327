"""The command line: ``tercet up | engine | router | demo``."""

from tercet.cli.app import main

__all__ = ["main"]
