"""The router: vLLM's OpenAI server over an engine-core client that runs programs.

vLLM provides chat templates, detokenisation, stop strings, logprobs, usage, tool and reasoning parsers and the error
format; :mod:`.openai` assembles them. Every request first passes :mod:`.router_app`.
:mod:`.serve.service` runs a program for each sequence. :mod:`.server` assembles the router.
"""
