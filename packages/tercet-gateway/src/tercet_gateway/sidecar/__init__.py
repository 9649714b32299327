"""A proxy of a decode engine: it lets engines that requests name prefill prompts, and passes everything else on.

:mod:`.prefill_legs` has the prompt's KV sent to the engine, by the verbs or by vLLM's own protocol; :mod:`.proxy`
passes requests and answers on, and assembles ``tercet sidecar``.
"""
