"""Programs: serving patterns as async generators over a request and a fleet."""

from tercet.programs.answer import Answer, outputs_of, run_program
from tercet.programs.auto import auto
from tercet.programs.balanced import balanced
from tercet.programs.cache_bypass import cache_bypass
from tercet.programs.conditional import conditional
from tercet.programs.data_parallel import data_parallel
from tercet.programs.disaggregated import disaggregated
from tercet.programs.loading import BUILT_IN, Program, load_program, name_of
from tercet.programs.migrate_context import migrate_context

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
    "load_program",
    "migrate_context",
    "name_of",
    "outputs_of",
    "run_program",
]
