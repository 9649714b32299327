"""The benchmark of an OpenAI endpoint: arrivals, workloads, a streaming client, summaries and reports.

Modules without I/O: ``summary`` defines the metrics; ``workloads`` decides which requests are sent and when;
``compare`` computes ratios. Modules with I/O: ``openai_client`` sends one request and parses its answer, ``traffic``
queries the server and sends a plan of requests, ``experiment`` measures every point of a configuration.
``results`` defines the result file; ``result_report`` formats it for people.
"""
