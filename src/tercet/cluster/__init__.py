"""Engines and the front door as running processes: on this machine, on Ray, on Kubernetes."""
