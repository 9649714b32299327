"""Parts of HTTP servers that routers, engines and pickers have in common: limits, errors, traces, who may call."""
