"""How an engine's processes start: one import, checks with remedies before weights are loaded, settings, quiet logs.

Without an import of vLLM, since they run before it is imported or replace what they are given: ``leak_reports``,
``log_noise``, ``patching``, ``plugin_settings``, ``refusals``, ``server``, ``standby``.
"""
