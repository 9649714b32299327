"""Dashboards for Grafana, made of the metrics that ``docs/reference/metrics.md`` lists."""
