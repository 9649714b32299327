"""What runs in an engine's workers: the KV cache's memory and layout, and which layers are finished.

Without an import of vLLM: ``model_fingerprint`` digests a config that it is given, ``step_layers`` only decides, and
``worker_side`` is called by the connector with what it needs.
"""
