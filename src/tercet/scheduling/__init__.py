"""Which engine: pure functions over what is known of the candidates."""

from tercet.scheduling.pickers import PICKERS, Candidate, Picker, least_loaded, round_robin

__all__ = ["PICKERS", "Candidate", "Picker", "least_loaded", "round_robin"]
