"""What all tests have in common."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Machines that run these tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tercet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make check`; `make test` runs all examples.
settings.register_profile("quick", settings.get_profile("tercet"), max_examples=20)
settings.load_profile("tercet")
