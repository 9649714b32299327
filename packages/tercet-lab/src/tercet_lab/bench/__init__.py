"""The benchmark of an OpenAI endpoint: arrivals, workloads, a streaming client, results, figures and reports.

``experiment`` measures every point of a configuration, and compares programs; ``traffic`` sends one point's requests by
``openai_client``. ``results`` defines records, metrics and the result file; ``bench_report`` and ``figures`` show it.
"""
