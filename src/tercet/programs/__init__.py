"""Programs: serving patterns as async generators over a request and a fleet."""

from tercet.programs.loading import BUILT_IN, Program, load_program, name_of
from tercet.programs.patterns import (
    Answer,
    auto,
    balanced,
    cache_bypass,
    conditional,
    data_parallel,
    disaggregated,
    fetch,
    migrate_context,
    outputs_of,
    run_program,
)

__all__ = [
    "BUILT_IN", "Answer", "Program", "auto", "balanced", "cache_bypass", "conditional", "data_parallel",
    "disaggregated", "fetch", "load_program", "migrate_context", "name_of", "outputs_of", "run_program",
]  # fmt: skip
