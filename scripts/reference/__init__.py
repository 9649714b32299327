"""The reference part of the manual, ``docs/reference``, out of what the code declares."""
