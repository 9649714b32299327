"""Code that runs in an engine's API server and uses vLLM's client: it implements the verbs' generation half.

The verbs themselves are in :mod:`tercet.engine`.
"""
