"""``python -m tercet.cli``."""

from tercet.cli.app import main

main()
