"""The router's side of vLLM: its OpenAI server, over an engine-core client that runs programs.

Chat templates, detokenisation, stop strings, logprobs, usage, tool and reasoning parsers and the error format are
vLLM's. :mod:`.openai_server` puts its parts together, with :mod:`.program_client` instead of the client of a local
engine. Plain streams use the :mod:`.fast_path`: vLLM's serving objects read and check the request, and the chunks of
the answer are written here.

Without an import of vLLM: ``converted_streams`` wraps streams that it is given, ``server_options`` reads arguments.
"""
