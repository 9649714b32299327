"""Which engine: filters, scorers and pickers over what is known of the candidates. Pure, without I/O.

A plugin of one's own is one class made from :class:`Filter`, :class:`Scorer`, :class:`Picker` or :class:`Decider`.
"""

from tercet.scheduling.assembly import files_of, load_scheduling
from tercet.scheduling.pickers import PICKERS, least_loaded, round_robin
from tercet.scheduling.plugin import Decider, Decision, Engines, Filter, Knowledge, Picker, Scorer
from tercet.scheduling.profiles import SCHEDULED, Scheduling, SchedulingProfile

__all__ = [
    "PICKERS",
    "SCHEDULED",
    "Decider",
    "Decision",
    "Engines",
    "Filter",
    "Knowledge",
    "Picker",
    "Scheduling",
    "SchedulingProfile",
    "Scorer",
    "files_of",
    "least_loaded",
    "load_scheduling",
    "round_robin",
]
