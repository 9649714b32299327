"""``python -m tercet.cli``."""

from tercet.cli import main

main()
