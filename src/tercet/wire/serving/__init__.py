"""Common parts of the HTTP servers of routers, engines and pickers: limits, errors, traces, callers."""
