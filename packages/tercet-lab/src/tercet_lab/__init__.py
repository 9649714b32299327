"""The laboratory: simulated engines, benchmarks with their figures, and fault injection. Serving does not need it."""
