"""The streaming fast path of a router: streams that bypass vLLM's layers. If it is off, vLLM's own path serves them.

:mod:`.entry` takes a request and has vLLM's serving object prepare it; :mod:`.request_stream` writes each output of its
choices to the socket: text by :mod:`.parsed_text` and :mod:`.logprob_chunks`, as events by :mod:`.sse_chunks` and
:mod:`.agent_answers`.
"""
