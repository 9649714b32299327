"""How an engine's processes start: one import, checks with remedies before weights are loaded, settings, quiet logs."""
