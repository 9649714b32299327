"""The page at ``/tercet``: what a fleet does now, or did in a simulation, as a stream of records."""
