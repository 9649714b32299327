"""Everything that depends on vLLM's internals, in one package: :mod:`.hooks` lists and checks each dependency.

vLLM loads three modules here by name, through flags and entry points:

- :mod:`.connector`, the KV connector (``--kv-transfer-config``), in the scheduler's process and in each worker;
- :mod:`.register`, a general plugin, in every process that vLLM starts;
- :mod:`.endpoint`, an endpoint plugin, in the API server: the verbs over HTTP.

What they do is in :mod:`.engine`. The registry has two sides: :mod:`.engine_hooks` with :mod:`.start_hooks`, in a vLLM
server, and :mod:`.frontend_hooks`, in a router's process around vLLM's OpenAI layer.
"""
