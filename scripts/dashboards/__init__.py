"""The dashboards for Grafana, generated from the metrics in the page of metrics, ``docs/reference/metrics.md``."""
