"""Everything that depends on vLLM's internals, in one package: :mod:`.hooks` lists and checks each dependency.

vLLM loads three modules here by name, through flags and entry points:

- :mod:`.connector`, the KV connector (``--kv-transfer-config``), in the scheduler's process and in each worker;
- :mod:`.register`, a general plugin, in every process that vLLM starts;
- :mod:`.endpoint`, an endpoint plugin, in the API server: the verbs over HTTP.

An engine's processes have a package each: :mod:`.edge`, the API server, with the verbs; :mod:`.core`, next to the
scheduler; :mod:`.worker`, with the KV cache. :mod:`.start` is how they start. :mod:`.frontend` and :mod:`.fast_path`
are a router's: vLLM's OpenAI layer over a client that runs programs. The registry has two sides, :mod:`.engine_hooks`
with :mod:`.start_hooks`, and :mod:`.frontend_hooks`.
"""
