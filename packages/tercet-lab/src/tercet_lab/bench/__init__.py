"""The benchmark of an OpenAI endpoint: arrivals, workloads, a streaming client, summaries and reports.

Modules without I/O: ``summary`` defines the metrics; ``arrivals``, ``workloads`` and ``compose`` decide which requests
are sent and when; ``stream_reader`` parses answers; ``compare`` computes ratios. Modules with I/O: ``target`` queries
the server, ``openai_client`` sends one request, ``traffic`` sends a plan of requests, ``experiment`` measures every
point of a configuration. ``results`` defines the result file; ``result_report`` formats it for people.
"""
