"""Commands that this package adds to ``tercet``."""
