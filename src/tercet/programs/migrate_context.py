"""Context migration: what one engine has cached is moved to another, and no request waits for it."""

from tercet.protocol import BadRequest, Fleet, Request, Sent


async def migrate_context(fleet: Fleet, prefix: Request, source: str, destination: str) -> Sent | None:
    """Have ``prefix`` in the cache of ``destination``, from ``source``; None if all of it is there already.

    ``source`` sends what it has cached, and computes what it has not. Afterwards the prefix is ordinary prefix cache
    of ``destination``, in full blocks. Raises :class:`~tercet.protocol.UnknownEngine`, and
    :class:`~tercet.protocol.NoSpace` if ``destination`` has no room.
    """
    if source == destination:
        raise BadRequest(f"destination: is {destination}, and so is source; name two engines", "destination")
    with fleet.engine(source) as sender, fleet.engine(destination) as receiver:
        async with receiver.prep_recv(prefix) as space:
            if not space.missing:
                return None
            return await sender.remote_send(prefix, space, space.matched_len)
