"""Several models at one address: ``tercet model-router`` passes each request to a router of its model.

``backends`` decides which router gets a request, and asks routers for their models; ``server`` passes requests and
answers on byte for byte, and assembles the command; ``upgrading`` replaces a fleet by another one.
"""
