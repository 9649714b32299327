"""The page at ``/tercet``, which shows a live fleet or a recorded simulation as a stream of records."""
