"""Declarations of settings: fields whose annotations hold bounds (``msgspec.Meta``) and a description for people.

``limit: Annotated[AtLeastOne | None, Setting("Most running requests.")] = None`` is a whole declaration. The name
that people use, the *key*, is the field's name in kebab case, or the ``name`` given to :func:`msgspec.field`. A field
whose type is a :class:`Settings` is a group: its settings stand among the others, under their own keys.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.hosts import LAST_PORT

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=LAST_PORT)]
# A port that has been chosen: 0 does not mean any free port.
FixedPort = Annotated[int, msgspec.Meta(ge=1, le=LAST_PORT)]
# The limit excludes infinity, which JSON cannot express.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1_000_000_000)]

VARIABLE_PREFIX = "TERCET_"
SECRET_VARIABLE = "TERCET_SECRET"
"""Variable of the fleet's shared secret. There is no flag for it: other users of the machine can read command lines."""
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list",
          "object": "a mapping of keys to values"}  # fmt: skip
_BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}


@dataclass(frozen=True)
class Setting:
    """Description of a field for people, and its exceptions from the rules for names.

    ``flag``: None means ``--KEY``, an empty text means no flag; a list has one flag for each item.
    ``env``: None means ``TERCET_KEY``. ``default``: the text that help shows instead of the default value. ``read``
    converts a given item of a list and its index to the item's value. ``is_key``: the value is a credential that
    callers show, so a blank one is refused. ``in_file``: servers take the setting from a file only, not from a flag.
    """

    help: str
    flag: str | None = None
    env: str | None = None
    unit: str = ""
    metavar: str = ""
    default: str = ""
    panel: str = ""
    read: Callable[[Any, int], Any] | None = None
    is_key: bool = False
    in_file: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Base class of settings. Construction checks every bound, and raises :class:`~tercet.protocol.BadRequest`.

    A subclass that defines ``__post_init__`` calls the one of this class first.
    """

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            if is_group(field.type):
                continue
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise complaint(field.encode_name, field.type, value, error) from None


@dataclass(frozen=True)
class Declared:
    """One setting of a class: its key, the attributes that lead to it, its type and default, and its description."""

    key: str
    path: tuple[str, ...]
    type: Any
    setting: Setting
    default: Any

    @property
    def flag(self) -> str:
        """The flag of a server's command line; empty if there is none."""
        return "" if self.setting.in_file else self.any_flag

    @property
    def any_flag(self) -> str:
        """The flag of a simulation's command line, which has no file of settings; empty if there is none."""
        return f"--{self.key}" if self.setting.flag is None else self.setting.flag

    @property
    def env(self) -> str:
        """The environment variable."""
        return self.setting.env or VARIABLE_PREFIX + self.key.upper().replace("-", "_")

    @property
    def plain(self) -> Any:
        """The type without annotations, and without None."""
        return plain_type(self.type)

    @property
    def is_list(self) -> bool:
        """True if the flag may be repeated, each time with one item."""
        return get_origin(self.plain) is tuple

    @property
    def is_mapping(self) -> bool:
        """True if the flag may be repeated, each time with KEY=VALUE."""
        return get_origin(self.plain) is Mapping

    @property
    def is_required(self) -> bool:
        """True if the setting has no default and must be given."""
        return self.default is msgspec.NODEFAULT

    @property
    def shown_default(self) -> str:
        """The default as help shows it; empty if there is none to show."""
        if self.setting.default:
            return self.setting.default
        if self.is_required or self.default is None or self.default is False or self.default in ((), {}):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help(self) -> str:
        """The help text, with the unit."""
        unit = f" ({self.setting.unit})" if self.setting.unit else ""
        return f"{self.setting.help.rstrip('.')}{unit}."

    @property
    def shown_kind(self) -> str:
        """The kind of value, as help and tables show it, such as ``INTEGER``; empty for a truth value."""
        if self.setting.metavar:
            return self.setting.metavar
        if get_origin(self.plain) is Literal:
            return "|".join(map(str, get_args(self.plain)))
        known = {int: "INTEGER", float: "NUMBER", bool: ""}
        return "KEY=VALUE" if self.is_mapping else known.get(self.plain, "TEXT")


@cache  # msgspec evaluates a class's annotations each time
def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a class, with their types."""
    return msgspec.structs.fields(kind)


@cache
def declared(of: type[msgspec.Struct]) -> tuple[Declared, ...]:
    """Return all settings of a class in the order of its fields; a group is replaced by its settings."""
    return tuple(_walk(of, ()))


def _walk(of: type[msgspec.Struct], path: tuple[str, ...]) -> Iterable[Declared]:
    for field in fields_of(of):
        here = (*path, field.name)
        if is_group(field.type):
            yield from _walk(field.type, here)
            continue
        told = next(
            (each for each in getattr(field.type, "__metadata__", ()) if isinstance(each, Setting)), Setting("")
        )
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        yield Declared(field.encode_name, here, field.type, told, default)


def is_group(kind: Any) -> bool:
    """True if a field of the type ``kind`` is a group of settings."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def plain_type(kind: Any) -> Any:
    """Return a type without annotations, and ``T`` for ``T | None``."""
    if get_origin(kind) is Annotated:
        return plain_type(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [each for each in get_args(kind) if each is not type(None)]
        return plain_type(others[0]) if len(others) == 1 else kind
    return kind


# ---- errors about values ---------------------------------------------------------------------------------------


def complaint(name: str, kind: Any, value: Any, error: msgspec.ValidationError, param: str = "") -> BadRequest:
    """Return msgspec's error about a value in plain English: ``queue-timeout: must be greater than 0, is -1``."""
    reason, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    given = _given(value, path)
    words = _in_words(reason, kind, path)
    if not isinstance(given, str | int | float | bool):
        return BadRequest(f"{name}{path}: {words}", param or name)
    is_alone = isinstance(value, list) and len(cast("list[Any]", value)) == 1 and path == "[0]"
    return BadRequest(f"{name}{'' if is_alone else path}: {words}, is {_shown(given)}", param or name)


def _given(value: Any, path: str) -> Any:
    """Return the value at a path such as ``.plugins[0]``; None if the path does not exist or has ``[...]``."""
    if "[...]" in path:
        return None
    for name, index in re.findall(r"\.([\w-]+)|\[(\d+)\]", path):
        try:
            value = value[int(index)] if index else value[name]
        except (LookupError, TypeError):
            return None
    return value


def _shown(value: str | float | bool) -> str:
    is_number = isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?", value)
    return repr(value) if isinstance(value, str) and not is_number else str(value)


def _in_words(reason: str, kind: Any, path: str) -> str:
    if bound := re.fullmatch(r"Expected `\w+`(?: of length)? (>=|>|<=|<) (\S+)", reason):
        least = f"{_BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}"
        if "of length" in reason:
            return "must not be empty" if least == "at least 1" else f"must be of length {least}"
        return f"must be {least}"
    if expected := re.match(r"Expected `([^`]+)`(?:, got|$)", reason):
        kinds = [_KINDS.get(each, each) for each in expected[1].split(" | ") if each != "null"]
        return f"must be {' or '.join(kinds)}"
    if reason.startswith("Invalid enum value") and isinstance(found := _at(kind, path), msgspec.inspect.LiteralType):
        return f"must be one of {', '.join(map(str, found.values))}"
    if missing := re.search(r"missing required field `(.*)`", reason):
        return f"{missing[1]} is needed"
    if unknown := re.search(r"unknown field `(.*)`", reason):
        found = _at(kind, path)
        known = [field.encode_name for field in found.fields] if isinstance(found, msgspec.inspect.StructType) else []
        return f"unknown key {unknown[1]}; {near(unknown[1], known)}"
    return reason[:1].lower() + reason[1:]


# Similarity at or above which a name is preferred to one that contains the given word; shortest length of such a word.
LIKE, WORD = 0.85, 4


def near(given: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown key: the most similar known key, or all of them."""
    dashed = given.replace("_", "-")
    word = dashed.lstrip("-")
    found = (
        difflib.get_close_matches(dashed, known, 1, LIKE)
        or [name for name in known if len(word) >= WORD and word in name.split("-")]
        or difflib.get_close_matches(dashed, known, 1)
        or difflib.get_close_matches(given, known, 1)
    )
    if found:
        return f"did you mean {found[0]}?"
    return f"the keys are {', '.join(known)}" if known else "no keys are allowed here"


def _at(kind: Any, path: str) -> msgspec.inspect.Type:
    """Return the type at a path such as ``.plugins[...]`` inside the type ``kind``."""
    found = _bare(msgspec.inspect.type_info(kind))
    for name in re.findall(r"\.([\w-]+)|\[", path):
        if isinstance(found, msgspec.inspect.StructType) and name:
            found = next(field.type for field in found.fields if field.encode_name == name)
        elif isinstance(found, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
            found = found.item_type
        elif isinstance(found, msgspec.inspect.DictType):
            found = found.value_type
        found = _bare(found)
    return found


def _bare(kind: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _bare(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return _bare(next(each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)))
    return kind


def key_values(given: Iterable[str] | None, name: str) -> dict[str, str]:
    """Return ``KEY=VALUE`` items as a mapping; raise :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    found: dict[str, str] = {}
    for item in given or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise BadRequest(f"{name}: {item!r} is not KEY=VALUE", name)
        found[key] = value
    return found
