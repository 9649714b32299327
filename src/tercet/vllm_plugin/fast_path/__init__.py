"""The streaming fast path of a router: streams that bypass vLLM's layers. If it is off, vLLM's own path serves them.

Without an import of vLLM: ``entry``, which uses the routes and the stream; ``parsed_deltas``, which gets a parser;
``fast_path_hooks`` and ``agent_api_hooks``, which name the parts of vLLM that the fast path relies on; ``sse_chunks``,
which writes bytes; ``answer_events``, the common interface of the APIs' formats; and ``item_events``, the base class
of two formats.
"""
