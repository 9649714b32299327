"""Buckets that histograms of several processes share."""

from __future__ import annotations

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Seconds, from the step of a small model to the longest wait of a client."""
