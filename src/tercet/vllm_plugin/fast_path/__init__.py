"""The streaming fast path of a router: streams around vLLM's layers. Without it, vLLM's own path serves them.

Without an import of vLLM: ``fast_path_hooks``, which names what is relied on, and ``sse_chunks``, which writes bytes.
"""
