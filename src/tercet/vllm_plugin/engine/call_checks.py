"""What the edge refuses before it reaches a connection that others share."""

from __future__ import annotations

import re

from tercet.protocol import BadRequest, KVAddrInfo

LEASE = re.compile(r"[0-9a-f]{32}")
ADDRESS = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}")


def check_address(info: KVAddrInfo) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for what no engine has handed out."""
    addresses = [address for rank in info.ranks for address in rank.addresses]
    well_formed = (
        LEASE.fullmatch(info.lease)
        and 0 <= info.begin < info.end
        and info.begin % info.layout.block_size == 0
        and all(rank.addresses for rank in info.ranks)
        and all(ADDRESS.fullmatch(address) and int(address.rpartition(":")[2]) < 65536 for address in addresses)
    )
    if info.transport != "tcp" or not well_formed:
        raise BadRequest("kv_addr_info: not one that prep_recv returned", "kv_addr_info")
