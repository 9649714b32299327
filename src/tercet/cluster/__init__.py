"""Engines and a router as processes of this machine."""
