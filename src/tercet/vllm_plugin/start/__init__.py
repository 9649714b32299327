"""The start of an engine's processes: one import, checks with remedies before weights are loaded, settings, quiet logs.

Without an import of vLLM, since they run before it is imported, or replace the objects that they are given:
``plugin_settings``, ``server``, ``standby``.
"""
