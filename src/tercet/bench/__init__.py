"""Measuring an OpenAI endpoint: arrivals, workloads, a streaming client, summaries, reports.

``summary`` says what is measured; ``arrivals``, ``workloads``, ``compose``, ``stream_reader`` and ``compare`` decide;
none of them does I/O. ``target`` asks a server who it is, ``openai_client`` sends one request, ``traffic`` a plan of
them, ``experiment`` every point of a configuration. ``results`` is what a file holds; ``result_report`` shows it.
"""
