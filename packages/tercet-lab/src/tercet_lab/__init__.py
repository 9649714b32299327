"""The laboratory: simulated engines, and benchmarks with their figures. Serving does not need it."""
