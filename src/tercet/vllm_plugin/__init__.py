"""Everything that depends on vLLM's internals, in one package: :mod:`.hooks` lists and checks each dependency.

vLLM loads three modules here by name, through flags and entry points:

- :mod:`.connector`, the KV connector (``--kv-transfer-config``), in the scheduler's process and in each worker;
- :mod:`.register`, a general plugin, in every process that vLLM starts;
- :mod:`.endpoint`, an endpoint plugin, in the API server: the verbs over HTTP.

Each of an engine's processes has a package: :mod:`.edge` for the API server, with the verbs; :mod:`.core` for the
scheduler's process; :mod:`.worker` for the processes with the KV cache. :mod:`.start` contains their start.
:mod:`.frontend` and :mod:`.fast_path` belong to a router: vLLM's OpenAI layer over a client that runs programs. The
registry, :mod:`.hooks`, has three sides: :mod:`.engine_hooks`, :mod:`.frontend_hooks` and :mod:`.fast_path_hooks`.
"""
