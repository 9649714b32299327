"""Both ends of the connections between routers, engines and pickers: clients, token streams, parts of ASGI servers."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets of histograms of seconds, in every process: from the step of a small model to the longest wait of a client.

Histograms of several processes can only be added if their buckets are equal.
"""
