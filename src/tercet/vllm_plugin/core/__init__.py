"""Code that runs in an engine's core, next to vLLM's scheduler: reservations, and the KV to send in each step.

Without an import of vLLM: ``keyed_prompt``, a record of tokens and their key, which API server and core exchange, and
``grammar_queue``, the order in which grammars are tried, a state machine.
"""
