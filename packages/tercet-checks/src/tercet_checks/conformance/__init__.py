"""Conformance of engines: checks of the verbs as a black box over HTTP, for authors of other engines.

:mod:`.lone_checks` need one engine, :mod:`.pair_checks` two that exchange KV; :mod:`.trials` runs them.
"""

from tercet_checks.conformance import lone_checks, pair_checks
from tercet_checks.conformance.trials import CHECKS, CheckResult, VerbCheck, run_checks

__all__ = ["CHECKS", "CheckResult", "VerbCheck", "lone_checks", "pair_checks", "run_checks"]
