"""Filters: which engines are left out."""

from tercet.scheduling.filters.health import HealthFilter
from tercet.scheduling.filters.label import ByLabel, ByLabelSelector
from tercet.scheduling.filters.role import DecodeFilter, PrefillFilter
from tercet.scheduling.filters.saturation import SaturationFilter

__all__ = ["ByLabel", "ByLabelSelector", "DecodeFilter", "HealthFilter", "PrefillFilter", "SaturationFilter"]
