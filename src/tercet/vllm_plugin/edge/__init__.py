"""What runs in an engine's API server: verbs and their checks, time limits of leases, calls to core and agents."""
