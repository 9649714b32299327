"""The laboratory: simulated engines, benchmarks and their figures, faults on purpose. Nothing that serves needs it."""
