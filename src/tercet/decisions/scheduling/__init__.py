"""Choice of engines: filters, scorers and pickers that use data about the candidates. Pure, without I/O.

A custom plugin is one class derived from :class:`Filter`, :class:`Scorer`, :class:`Picker` or :class:`Decider`.
"""

from tercet.decisions.scheduling.assembly import load_scheduling
from tercet.decisions.scheduling.plugin import Decider, Decision, Engines, Filter, Knowledge, Picker, Scorer
from tercet.decisions.scheduling.profiles import PICKERS, ConcurrencyLimit, Saturation, Scheduling, SchedulingProfile

__all__ = [
    "PICKERS", "ConcurrencyLimit", "Decider", "Decision", "Engines", "Filter", "Knowledge", "Picker", "Saturation",
    "Scheduling", "SchedulingProfile", "Scorer", "load_scheduling",
]  # fmt: skip
