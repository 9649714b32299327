"""Code that runs in an engine's workers: the KV cache's memory and layout, and reports of finished layers.

Without an import of vLLM: ``kv_planes`` cuts tensors that it is given, and the connector calls ``worker_side`` with all
that it needs.
"""
