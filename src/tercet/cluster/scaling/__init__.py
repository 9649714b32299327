"""Fleets that grow and shrink while they serve.

:mod:`.decide` is pure: it says what is to be done next. :mod:`.scaler` has it done, by the hands of one kind of fleet
(this machine, Ray); :mod:`.control` is how a command asks the process that owns the fleet. Kubernetes does this by
itself, and :mod:`.kubernetes` only tells it how many.
"""
