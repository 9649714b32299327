"""The router's side of vLLM: vLLM's OpenAI server, on an engine-core client that runs programs.

Chat templates, detokenisation, stop strings, logprobs, usage, tool and reasoning parsers and the error format are
vLLM's. :mod:`.openai_server` assembles vLLM's parts, with :mod:`.program_client` instead of the client of a local
engine. Streams use :mod:`.fast_path`: vLLM's serving objects read and check the request, and the
fast path writes the chunks of the answer.

Without an import of vLLM: ``frontend_hooks`` and ``fast_path_hooks``, this room's sides of the registry in
:mod:`tercet.vllm_plugin.hooks`.
"""
