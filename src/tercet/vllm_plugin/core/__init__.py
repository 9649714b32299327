"""Code that runs in an engine's core, next to vLLM's scheduler: reservations, and the KV to send in each step."""
