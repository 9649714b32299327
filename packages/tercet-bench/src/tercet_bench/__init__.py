"""Measurements of real servers: any OpenAI endpoint, programs side by side, reports, and profiles of engines.

``experiment`` measures every point of a configuration, and compares programs; ``traffic`` sends one point's requests by
``openai_client``. ``bench_report`` and ``figures`` show result files, also those of simulations.
"""
