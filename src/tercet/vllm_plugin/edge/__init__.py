"""Code that runs in an engine's API server: verbs and their checks, time limits of leases, calls to core and agents.

Without an import of vLLM, since they access the core, the agents and the callers only by Tercet's own types:
``agent_calls``, ``agent_metrics``, ``agent_reports``, ``block_tables``, ``bypass``, ``lease_timers``,
``liveness_probe``, ``receiving``, ``send_destinations``, ``sequence_table``, ``sequence_work``, ``stopping``.
``text_fingerprint`` reads the tokenizer that it is given.
"""
