"""The streaming fast path of a router: plain streams around vLLM's layers. Without it, vLLM's own path serves them."""
