"""Programs: serving patterns as async generators over a request and a fleet."""

from tercet.programs.answer import Answer, outputs_of, run_program
from tercet.programs.disaggregated import disaggregated
from tercet.programs.loading import BUILT_IN, Program, load_program, name_of
from tercet.programs.patterns import auto, balanced, cache_bypass, conditional, data_parallel, fetch, migrate_context

__all__ = [
    "BUILT_IN",
    "Answer",
    "Program",
    "auto",
    "balanced",
    "cache_bypass",
    "conditional",
    "data_parallel",
    "disaggregated",
    "fetch",
    "load_program",
    "migrate_context",
    "name_of",
    "outputs_of",
    "run_program",
]
