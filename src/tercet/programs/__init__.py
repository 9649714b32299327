"""Programs: serving patterns as async generators over a request and a fleet."""

from tercet.programs.balanced import balanced
from tercet.programs.data_parallel import data_parallel
from tercet.programs.disaggregated import disaggregated
from tercet.programs.loading import BUILT_IN, Program, load_program

__all__ = ["BUILT_IN", "Program", "balanced", "data_parallel", "disaggregated", "load_program"]
