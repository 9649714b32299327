"""Flags that callers pass on to vLLM: which are set, and which are not theirs to set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tercet.protocol import BadRequest

KV_TRANSFER = "--kv-transfer-config"
# Tercet finds the server under these; as vLLM flags they would move it to where nobody looks.
_TERCETS_OWN = {
    "--model": "--model",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
}


def check_flags(args: Sequence[str], where: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for what cannot be passed on; ``where`` says what they were given as.

    Everything else is vLLM's to judge.
    """
    if args and not args[0].startswith("-"):
        raise BadRequest(f"{where}: {args[0]!r} is not a flag; vLLM's own flags begin with one", where)
    for flag, _ in _flags(args):
        if flag in _TERCETS_OWN:
            raise BadRequest(f"{where}: {flag} is Tercet's own; give it before the --, or as a key of its own", where)


def value_of(args: Sequence[str], *names: str) -> str | None:
    """The last value that ``args`` give to a flag under any of its ``names``; ``""`` if it has none."""
    found = None
    for flag, value in _flags(args):
        if flag in names:
            found = value
    return found


def without(args: Sequence[str], name: str) -> list[str]:
    """``args`` less one flag that takes a value."""
    kept: list[str] = []
    skip = False
    for arg in args:
        if skip:
            skip = False
        elif _spelling(arg) == name:
            skip = "=" not in arg
        else:
            kept.append(arg)
    return kept


def _flags(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, whether written ``--flag value`` or ``--flag=value``."""
    for index, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        _, equals, value = arg.partition("=")
        following = args[index + 1] if index + 1 < len(args) else ""
        yield _spelling(arg), value if equals else "" if following.startswith("-") else following


def _spelling(arg: str) -> str:
    """A flag's name as vLLM documents it; ``--max_model_len`` is accepted too."""
    return arg.split("=", 1)[0].replace("_", "-") if arg.startswith("--") else arg.split("=", 1)[0]
