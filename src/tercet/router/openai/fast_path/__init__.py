"""The streaming fast path of a router: streams that bypass vLLM's layers. If it is off, vLLM's own path serves them.

:mod:`.request_stream` takes a request, has vLLM's serving object prepare it (:mod:`.preparing`), and writes each output
of its choices to the socket: text by :mod:`.parsed_text` and :mod:`.token_texts`, as events by :mod:`.sse_chunks` and
:mod:`.agent_answers`.
"""
