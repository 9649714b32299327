"""Engines on stock vLLM, and the registry of all dependencies on its internals: :mod:`.hooks` lists and checks them.

vLLM loads three modules here by name, through flags and entry points:

- :mod:`.connector`, the KV connector (``--kv-transfer-config``), in the scheduler's process and in each worker;
- :mod:`.register`, a general plugin, in every process that vLLM starts;
- :mod:`.endpoint`, an endpoint plugin, in the API server: the verbs over HTTP.

Each of an engine's processes has a package: :mod:`.edge` for the API server, with the verbs; :mod:`.core` for the
scheduler's process; :mod:`.worker` for the processes with the KV cache. :mod:`.start` contains their start.
The registry has three sides: :mod:`.engine_hooks`, and two of routers, in :mod:`tercet.router.openai`, which
is the only other room that imports vLLM.
"""
