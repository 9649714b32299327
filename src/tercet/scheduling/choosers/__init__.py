"""Pickers of profiles: one engine, from the scores of all."""

from tercet.scheduling.choosers.by_chance import RandomPicker, WeightedRandomPicker
from tercet.scheduling.choosers.max_score import MaxScorePicker
from tercet.scheduling.choosers.power_of_two import PowerOfTwoPicker

__all__ = ["MaxScorePicker", "PowerOfTwoPicker", "RandomPicker", "WeightedRandomPicker"]
