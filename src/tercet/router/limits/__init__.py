"""Limits of what clients send: sizes of bodies, numbers of items and of sequences."""
