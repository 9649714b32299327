"""Traffic that other proxies carry: ``tercet epp`` for Envoy, ``tercet sidecar`` and ``tercet model-router``.

:mod:`.exchange` implements Envoy's protocol without I/O, :mod:`.endpoint_picker` decides with the fleet's state and
scheduling plugins, :mod:`.openai_call` and :mod:`.model_renderer` make a prompt's tokens for it, :mod:`.server` serves
it. :mod:`.sidecar` and :mod:`.model_router` pass requests on by :mod:`.proxied_calls`.
"""
