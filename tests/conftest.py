"""What all tests have in common."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run these tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tercet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tercet")
