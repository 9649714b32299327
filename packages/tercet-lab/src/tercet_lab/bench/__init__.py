"""Simulated runs, the workloads that simulations and measurements share, and the results of both.

``results`` defines metrics and the result file of ``tercet bench`` and ``tercet sim``.
"""
