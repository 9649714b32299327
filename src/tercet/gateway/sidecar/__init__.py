"""In front of a decode engine: has prompts prefilled by engines that requests name, and passes everything else on.

:mod:`.prefill_legs` has the prompt's KV brought to the engine, by the verbs or by vLLM's own protocol, :mod:`.proxy`
passes requests and answers on, :mod:`.server` puts ``tercet sidecar`` together.
"""
