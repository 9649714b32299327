"""Measuring an OpenAI endpoint: arrivals, workloads, a streaming client, summaries, reports.

``records`` and ``summary`` say what is measured; ``arrivals``, ``workloads``, ``compose``, ``stream`` and ``compare``
decide; none of them does I/O. ``target`` asks a server who it is, ``client`` sends one request, ``traffic`` a plan of
them, ``experiment`` every point of a configuration. ``result`` is what a file holds; ``report`` and ``figure`` show it.
"""
