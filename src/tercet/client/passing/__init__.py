"""HTTP/1.1 passed on byte for byte: what both proxies of the house have in common.

``fields`` says which header fields are for the next hop alone, ``messages`` reads and writes messages on a connection,
``origin`` asks the server behind a proxy. Nothing is decoded, inflated, merged, renamed or added on the way; there is
no cookie jar and no redirect.
"""

from tercet.client.passing.fields import Fields, end_to_end, first, passed_on, passed_trailers, values
from tercet.client.passing.messages import BrokeOff, MessageTooLarge, NotReadable
from tercet.client.passing.origin import NotConnected, Origin, OriginAnswer

__all__ = [
    "BrokeOff",
    "Fields",
    "MessageTooLarge",
    "NotConnected",
    "NotReadable",
    "Origin",
    "OriginAnswer",
    "end_to_end",
    "first",
    "passed_on",
    "passed_trailers",
    "values",
]
