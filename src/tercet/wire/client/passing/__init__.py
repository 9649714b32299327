"""HTTP/1.1 that is passed on byte for byte: common code of both proxies.

``fields`` selects the header fields for the next hop only, ``messages`` reads and writes messages on a connection,
``origin`` calls the server behind a proxy. Nothing is decoded, decompressed, merged, renamed or added on the way;
cookies and redirects are not handled.
"""

from tercet.wire.client.passing.fields import (
    Fields,
    end_to_end,
    first,
    passed_on,
    passed_trailers,
    values,
    with_forwarder,
)
from tercet.wire.client.passing.messages import BrokeOff, MessageTooLarge, NotReadable
from tercet.wire.client.passing.origin import NotConnected, Origin, OriginAnswer

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
    "with_forwarder",
]
