"""The dashboards for Grafana, generated from the metrics in ``docs/reference/metrics.md``."""
