"""Helpers for asynchronous code in every package. They use only the standard library."""
