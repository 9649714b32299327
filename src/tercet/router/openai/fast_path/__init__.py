"""The streaming fast path of a router: streams that bypass vLLM's layers. If it is off, vLLM's own path serves them.

:mod:`.entry` takes a request, :mod:`.stream_plan` has vLLM's serving object prepare it, and :mod:`.request_stream`
writes each output of its choices to the socket: text by :mod:`.parsed_text` and :mod:`.logprob_chunks`, as events by
:mod:`.sse_chunks` and :mod:`.agent_answers`.

Without an import of vLLM: ``entry``, which uses the plan and the stream.
"""
