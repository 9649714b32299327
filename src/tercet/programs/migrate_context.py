"""Context migration: a copy of one engine's cached KV to another engine; no request waits for it."""

from tercet.protocol import BadRequest, Fleet, Request, Sent


async def migrate_context(fleet: Fleet, prefix: Request, source: str, destination: str) -> Sent | None:
    """Copy the KV of ``prefix`` from ``source`` into the cache of ``destination``; return None if all is there already.

    ``source`` sends the KV that it has cached, and computes the rest. Afterwards the prefix is ordinary prefix cache of
    ``destination``, in full blocks. Raises :class:`~tercet.protocol.UnknownEngine` and
    :class:`~tercet.protocol.NoSpace` if ``destination`` has no room.
    """
    if source == destination:
        raise BadRequest(
            f"destination: is {destination}, the same as source; name two different engines", "destination"
        )
    with fleet.engine(source) as sender, fleet.engine(destination) as receiver:
        async with receiver.prep_recv(prefix) as space:
            if not space.missing:
                return None
            return await sender.remote_send(prefix, space, space.matched_len)
