"""What KV on a GPU costs, as a table: see :mod:`.__main__`."""
