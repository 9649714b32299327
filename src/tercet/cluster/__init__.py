"""Engines and a front door as processes of this machine."""
