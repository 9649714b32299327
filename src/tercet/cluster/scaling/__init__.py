"""Fleets that grow and shrink while they serve.

:mod:`.decide` is pure: it decides the next steps. :mod:`.scaler` carries them out by the provisioner of a kind of fleet
(this machine, Ray), and is the link from a command to the process that owns the fleet. Kubernetes starts and stops
engines itself; :mod:`.kubernetes` only sets their number.
"""
