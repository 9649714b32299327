"""Code that runs in an engine's workers: the KV cache's memory and layout, and reports of finished layers.

Without an import of vLLM: ``model_fingerprint`` digests a config that it is given, ``step_layers`` only decides, and
the connector calls ``worker_side`` with all that it needs.
"""
