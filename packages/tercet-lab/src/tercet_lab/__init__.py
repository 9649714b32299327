"""The laboratory: simulated engines, and benchmarks with their figures. Serving does not need it."""

DEFAULT_PROFILE = "llama-3.1-8b-h100-tp1"
