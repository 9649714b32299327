"""The engine's side: what runs inside a vLLM server, from the HTTP verbs down to the worker's KV cache."""
