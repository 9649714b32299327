"""Several models at one address: ``tercet model-router`` passes each request to a router of its model.

``routes`` decides, without I/O, which router gets a request; ``proxy`` passes requests and answers on byte for byte;
``backends`` asks routers for their models; ``server`` assembles the command.
"""
