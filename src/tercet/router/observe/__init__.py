"""What a router shows of its requests: metrics, traces, spans and the access log."""
