"""Entry point of ``python -m tercet.cli``."""

from tercet.cli import main

main()
