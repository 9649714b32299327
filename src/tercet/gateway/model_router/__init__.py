"""Several models behind one address: each request goes to a router of its model. ``tercet model-router``.

``routes`` decides, without I/O, which router gets a request; ``proxy`` passes requests and answers on byte for byte;
``backends`` asks routers what they serve; ``server`` puts them together.
"""
