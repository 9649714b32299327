"""Serving: the service chooses a program for each sequence, runs it, and continues or moves the sequence."""
