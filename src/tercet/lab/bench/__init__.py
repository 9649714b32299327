"""Measuring an OpenAI endpoint: arrivals, workloads, a streaming client, summaries, reports.

``summary`` defines what is measured; ``arrivals``, ``workloads``, ``compose``, ``stream_reader`` and ``compare``
decide; none of them does I/O. ``target`` queries a server, ``openai_client`` sends one request, ``traffic`` a plan of
them, ``experiment`` every point of a configuration. ``results`` is the content of a file; ``result_report`` shows it.
"""
