"""Tercet inside a stock vLLM server: everything that touches vLLM's internals lives in this folder.

Three hooks, all loaded by vLLM itself through entry points or flags:

- ``connector.TercetConnector``, a KV connector (``--kv-transfer-config``), with one half in the scheduler's process
  (:mod:`.reservations`, :mod:`.sends`) and one in each worker (:mod:`.worker`);
- ``register.register``, a general plugin, adds the verbs to ``EngineCore`` (:mod:`.core`) and lets a request start
  with output that was generated elsewhere (:mod:`.resume`); on a CPU it lets vLLM's processes sleep while they wait for
  one another (:mod:`.waiting`);
- ``endpoint.TercetEndpoints``, an endpoint plugin, serves the verbs over HTTP (:mod:`.edge` carries them out).

:mod:`.compat` checks at start that this vLLM has what these rely on.
"""
