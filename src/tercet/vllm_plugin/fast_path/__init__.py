"""The streaming fast path of a router: streams around vLLM's layers. Without it, vLLM's own path serves them.

Without an import of vLLM: ``entry``, which asks the routes and the stream; ``parsed_deltas``, which is given a parser;
``fast_path_hooks`` and ``agent_api_hooks``, which name what is relied on; ``sse_chunks``, which writes bytes;
``answer_events``, which is what the formats of APIs have in common; and ``item_events``, of which two are made.
"""
