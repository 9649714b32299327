"""What a setting is: a field whose annotation says its bounds (``msgspec.Meta``) and what people need to know of it.

``limit: Annotated[AtLeastOne | None, Setting("Requests under way at once.")] = None`` is a whole declaration. The name
that people use, its *key*, is the field's name in kebab case, or the ``name`` given to :func:`msgspec.field`. A field
that is itself a :class:`Settings` is a group: its settings are among the others, under their own keys.
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

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
# Infinity, which JSON cannot say, is beyond it.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1_000_000_000)]

VARIABLE_PREFIX = "TERCET_"
SECRET_VARIABLE = "TERCET_SECRET"
"""Shared secret of the fleet. It has no flag: other users of the machine can read command lines."""
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list",
          "object": "a mapping of keys to values"}  # fmt: skip
_BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}


@dataclass(frozen=True)
class Setting:
    """What people are told of a field, and where it differs from the rule.

    ``flag`` is ``--KEY`` if not given, and empty where there is none; a list has one flag for each item. ``env`` is
    ``TERCET_KEY``. ``default`` is said instead of the default itself. ``read`` makes the value of an item of a list out
    of what was given, and its index. ``is_key``: callers show it, so a blank one is refused.
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
    """Base of settings. Construction checks every bound, and raises :class:`~tercet.protocol.BadRequest`.

    A subclass that checks more in ``__post_init__`` calls this one's first.
    """

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
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
        """As on a server's command line; empty if there is none."""
        return "" if self.setting.in_file else self.any_flag

    @property
    def any_flag(self) -> str:
        """As on the command line of a simulation, which has no file of settings; empty if there is none."""
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
        """Whether its flag may be repeated, each time with one item."""
        return get_origin(self.plain) is tuple

    @property
    def is_mapping(self) -> bool:
        """Whether its flag may be repeated, each time with KEY=VALUE."""
        return get_origin(self.plain) is Mapping

    @property
    def is_required(self) -> bool:
        """Whether it must be given."""
        return self.default is msgspec.NODEFAULT

    @property
    def shown_default(self) -> str:
        """The default in words; empty if there is nothing to say."""
        if self.setting.default:
            return self.setting.default
        if self.is_required or self.default is None or self.default is False or self.default in ((), {}):
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def help(self) -> str:
        """What it is, with its unit."""
        unit = f" ({self.setting.unit})" if self.setting.unit else ""
        return f"{self.setting.help.rstrip('.')}{unit}."

    @property
    def shown_kind(self) -> str:
        """What its value is, as help and tables say it."""
        if self.setting.metavar:
            return self.setting.metavar
        if get_origin(self.plain) is Literal:
            return "|".join(map(str, get_args(self.plain)))
        known = {int: "INTEGER", float: "NUMBER", bool: ""}
        return "KEY=VALUE" if self.is_mapping else known.get(self.plain, "TEXT")


@cache
def declared(of: type[msgspec.Struct]) -> tuple[Declared, ...]:
    """All settings of a class, those of its groups in their place."""
    return tuple(_walk(of, ()))


def _walk(of: type[msgspec.Struct], path: tuple[str, ...]) -> Iterable[Declared]:
    for field in msgspec.structs.fields(of):
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
    """Whether a field of this type is a group of settings."""
    return isinstance(kind, type) and issubclass(kind, Settings)


def plain_type(kind: Any) -> Any:
    """A type without annotations; of ``T | None``, ``T``."""
    if get_origin(kind) is Annotated:
        return plain_type(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [each for each in get_args(kind) if each is not type(None)]
        return plain_type(others[0]) if len(others) == 1 else kind
    return kind


# ---- what is wrong with a value ------------------------------------------------------------------------------


def complaint(name: str, kind: Any, value: Any, error: msgspec.ValidationError, param: str = "") -> BadRequest:
    """msgspec's error about a value, in plain English: ``queue-timeout: must be greater than 0, is -1``."""
    reason, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    given = _given(value, path)
    words = _in_words(reason, kind, path)
    if not isinstance(given, str | int | float | bool):
        return BadRequest(f"{name}{path}: {words}", param or name)
    is_alone = isinstance(value, list) and len(cast("list[Any]", value)) == 1 and path == "[0]"
    return BadRequest(f"{name}{'' if is_alone else path}: {words}, is {_shown(given)}", param or name)


def _given(value: Any, path: str) -> Any:
    """What is at a path such as ``.plugins[0]``; nothing where the path does not say which one."""
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


# How like another name is to be preferred to one of which the given one is a word; and how long words are at least.
LIKE, WORD = 0.85, 4


def near(given: str, known: Sequence[str]) -> str:
    """A hint for an unknown key."""
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
    return f"the keys are {', '.join(known)}" if known else "it takes none"


def _at(kind: Any, path: str) -> msgspec.inspect.Type:
    """The type at a path such as ``.plugins[...]`` inside another one."""
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
    """``KEY=VALUE`` items as a mapping; raises :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    found: dict[str, str] = {}
    for item in given or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise BadRequest(f"{name}: {item!r} is not KEY=VALUE", name)
        found[key] = value
    return found
