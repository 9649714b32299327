"""A report on the cost of KV on a GPU, as a table; see :mod:`.__main__`."""
