"""What runs in an engine's core, next to vLLM's scheduler: reservations, and which KV is sent or received in a step."""
