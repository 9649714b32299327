"""Measuring an OpenAI endpoint: arrivals, workloads, a streaming client, summaries, reports.

``records`` and ``summary`` say what is measured and do no I/O; ``arrivals``, ``workloads`` and ``compare`` decide
without I/O too; ``client``, ``run`` and ``provenance`` touch the network; ``result`` is what a file holds and
``report`` draws it.
"""
