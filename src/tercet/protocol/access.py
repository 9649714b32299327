"""Keys and secrets in settings: what a key may be, and how two secrets stand in one setting."""

from __future__ import annotations

from tercet.protocol.errors import BadRequest


def key_of(text: str, name: str) -> str:
    """Return the key in ``text`` without surrounding space, such as a line break; empty if ``text`` is empty.

    Raise :class:`~tercet.protocol.BadRequest` if ``text`` is blank but not empty, for example the line of an empty
    file: a key was intended, and without a key all callers would be accepted. Raise it also for a key that a header
    cannot carry. ``name`` is the setting's name.
    """
    key = text.strip()
    if text and not key:
        raise BadRequest(f"{name}: the key is blank; give a key, or leave {name} out", name)
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in key):
        raise BadRequest(f"{name}: has a control character; give a key of one line without control characters", name)
    if not key.isascii():
        raise BadRequest(f"{name}: has a character that is not ASCII, which a header cannot carry; use ASCII", name)
    return key


def given_key(text: str | None, name: str) -> str:
    """Return :func:`key_of` a flag's value, and an empty text without the flag (None).

    Raise :class:`~tercet.protocol.BadRequest` for an empty value, too: a key was intended.
    """
    return "" if text is None else key_of(text or " ", name)


def secrets_of(text: str) -> tuple[str, ...]:
    """Return the secrets in a setting, separated by spaces.

    The first makes proofs; two exist only during a rotation.
    """
    return tuple(text.split())
