"""Checks of fleets and engines: faults that are injected under load, and the conformance suite of the three verbs."""
