"""Declarations of settings: fields whose annotations hold bounds (``msgspec.Meta``) and a description for people.

``limit: Annotated[AtLeastOne | None, Setting("Most running requests.")] = None`` is a whole declaration. The name
that people use, the *key*, is the field's name in kebab case, or the ``name`` given to :func:`msgspec.field`. A field
whose type is a :class:`Settings` is a group: its settings stand among the others, under their own keys. A field of a
:class:`Settings` without a :class:`Setting` is a constant of the record: no flag, key or variable sets it, only code.
:func:`decode_settings` decodes and checks values, which come from flags, variables and YAML files.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec

from tercet.protocol import BadRequest
from tercet.protocol.access import given_key
from tercet.protocol.names import LAST_PORT

MODEL = "Model"
ENGINES = "Engines"
SERVER = "Server"
PLACEMENT = "Programs and placement"
LIMITS = "Limits"
FAILURES = "Failures"
MOVES = "Moves"
ACCESS = "Access"
OBSERVABILITY = "Observability"
KUBERNETES = "Kubernetes"


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
    """Description of a field for people, and its exceptions from the rules for names."""

    help: str
    # None means ``--KEY``, an empty text means no flag; a list has one flag for each item.
    flag: str | None = None
    # None means ``TERCET_KEY``.
    env: str | None = None
    unit: str = ""
    metavar: str = ""
    # The text that help shows instead of the default value.
    default: str = ""
    panel: str = ""
    # Converts a given item of a list and its index to the item's value.
    read: Callable[[Any, int], Any] | None = None
    # The value is a credential that callers show, so a blank one is refused.
    is_key: bool = False
    # Servers take the setting from a file only, not from a flag.
    in_file: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Base class of settings. Construction is the only check of values: every record is valid.

    It raises :class:`~tercet.protocol.BadRequest`. A subclass that defines ``__post_init__`` calls the one of this
    class first.
    """

    # The subject in help of the fields that name none; it is for groups, not for classes that others extend.
    panel: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields_of(type(self)):
            if is_group(field.type):
                continue
            value = getattr(self, field.name)
            try:
                # Flags, variables and YAML give numbers and truth values as text.
                msgspec.structs.force_setattr(self, field.name, msgspec.convert(value, field.type, strict=False))
            except msgspec.ValidationError as error:
                raise complaint(field.encode_name, field.type, value, error) from None
            except BadRequest as error:  # of a record in this field, which does not know the field's name
                raise BadRequest(f"{field.encode_name}: {error.message}", field.encode_name) from None


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
        setting = next((each for each in getattr(field.type, "__metadata__", ()) if isinstance(each, Setting)), None)
        if setting is None and issubclass(of, Settings):
            continue
        setting = setting or Setting("")
        setting = setting if setting.panel else replace(setting, panel=getattr(of, "panel", ""))
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        yield Declared(field.encode_name, here, field.type, setting, default)


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


S = TypeVar("S", bound=msgspec.Struct)
MOST_SETTINGS = 16 * 1024 * 1024
"""Largest file of settings, in bytes."""
# Kubernetes sets NAME_PORT to such a URL in every pod of a namespace that has a service NAME.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


@dataclass(frozen=True)
class Source:
    """Values by key from one place. An error about a value begins with ``origin``, then ``names[key]`` or the key."""

    values: Mapping[str, Any]
    origin: str = ""
    names: Mapping[str, str] | None = None

    def name_of(self, key: str) -> str:
        """Return the name of a setting in errors about this source."""
        return self.origin + (self.names or {}).get(key, key)


def decode_settings(kind: type[S], *sources: Source) -> S:
    """Return a record of ``kind``; the first source that has a setting gives its value.

    Numbers and truth values may be given as text, a list of one item as the item, and a text as a number. Raises
    :class:`~tercet.protocol.BadRequest` that names the setting as its source does; for an unknown key, it suggests the
    most similar one.
    """
    known = {each.key: each for each in declared(kind)}
    found: dict[str, tuple[Any, str]] = {}
    for source in reversed(sources):
        for key, value in source.values.items():
            if key not in known:
                raise BadRequest(f"{source.origin}unknown key {key}; {near(key, list(known))}", key)
            found[key] = value, source.name_of(key)
    values = {known[key].path: _prepared(known[key], value, name) for key, (value, name) in found.items()}
    for each in known.values():
        if each.is_required and each.key not in found:
            raise BadRequest(f"{sources[0].name_of(each.key) if sources else each.key}: is required", each.key)
    try:
        return _build(kind, values, ())
    except BadRequest as error:
        param = error.param or ""
        named = found.get(param, (None, ""))[1]
        reason = error.message.removeprefix(param)
        if named and reason != error.message and reason.startswith((":", "[", ".")):
            raise BadRequest(named + reason, param) from None
        origin = next((source.origin for source in sources if source.origin), "")
        raise BadRequest(origin + error.message, error.param) from None


def from_environment(kind: type[msgspec.Struct], environment: Mapping[str, str] = os.environ) -> Source:
    """Return the settings of environment variables; items of a list are separated as in a shell.

    In Kubernetes ``TERCET_PORT`` is a URL if a service is called ``tercet``: such a value is ignored.
    """
    found = list[Declared]()
    for each in declared(kind):
        text = environment.get(each.env, "")
        if text and not (each.env.endswith("_PORT") and _SERVICE_LINK.fullmatch(text)):
            found.append(each)
    values = {each.key: _from_text(each, environment[each.env]) for each in found}
    return Source(values, names={each.key: each.env for each in found})


def read_yaml(file: Path, name: str = "--config") -> Source:
    """Return the settings of a YAML file. Raises :class:`~tercet.protocol.BadRequest` that names the file."""
    content = load_yaml(file, f"{name} {file}")
    if not isinstance(content, dict):
        raise BadRequest(f"{name} {file}: must be a mapping of keys to values", name)
    values = {str(key): value for key, value in cast("dict[Any, Any]", content).items()}
    return Source(values, origin=f"{name} {file}: ")


def load_yaml(file: Path, name: str, param: str | None = None) -> Any:
    """Return the content of a YAML file. Raises :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    from tercet.aio.files import read_named  # asyncio and yaml take a third of the start of a command without a file

    param = param or name
    try:
        text = read_named(file, MOST_SETTINGS).decode("utf-8")
    except OSError as error:
        raise BadRequest(f"{name}: the file cannot be read: {error.strerror}", param) from error
    except ValueError as error:
        raise BadRequest(f"{name}: the file is not YAML: {error}", param) from error
    return parse_yaml(text, name, param)


def parse_yaml(text: str, name: str, param: str) -> Any:
    """Return the value of a YAML text. Raises :class:`~tercet.protocol.BadRequest` that begins with ``name``."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # PyYAML's loader takes the second value of a key that is given twice
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys: list[object] = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
            for index, key in enumerate(keys):
                if key in keys[:index]:
                    raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, UniqueKeys)
    # The loader does not wrap errors of dates and numbers.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadRequest(f"{name}: the file is not YAML: {' '.join(str(error).split())}", param) from error


def encode_settings(settings: msgspec.Struct) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by key; decoding them gives the same record."""
    values = ((each, attrgetter(".".join(each.path))(settings)) for each in declared(type(settings)))
    return {each.key: msgspec.to_builtins(value) for each, value in values if value != each.default}


def settings_from_parent(kind: type[S], file: Path) -> S:
    """Return the record that the process which started this one has encoded into ``file``, as JSON."""
    return decode_settings(kind, Source(msgspec.json.decode(file.read_bytes())))


def _build(kind: type[S], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]) -> S:
    fields: dict[str, Any] = {}
    for field in fields_of(kind):
        here = (*path, field.name)
        if is_group(field.type):
            fields[field.name] = _build(field.type, values, here)
        elif here in values:
            fields[field.name] = values[here]
    return kind(**fields)


def _prepared(of: Declared, value: Any, name: str) -> Any:
    """Return a value in the shape of the setting's type; the record converts and checks it."""
    if value is None:
        return value
    if of.is_mapping and isinstance(value, dict):
        given = cast("dict[Any, Any]", value)
        texts = get_args(of.plain)[1:] == (str,)
        return {str(key): _as_text(item) if texts else item for key, item in given.items()}
    if of.is_list:
        items: list[Any] = list(cast("Any", value)) if isinstance(value, list | tuple) else [value]
        if of.setting.read is None:
            return [_as_text(item) for item in items] if get_args(of.plain)[0] is str else items
        try:
            return [of.setting.read(item, index) for index, item in enumerate(items)]
        except BadRequest as error:
            raise BadRequest(f"{name}: {error.message}", of.key) from error
    if of.setting.is_key and isinstance(value, str):
        return given_key(value, name)
    return _as_text(value) if of.plain is str else value


def _from_text(of: Declared, text: str) -> Any:
    if not (of.is_list or of.is_mapping):
        return text
    try:
        items = shlex.split(text)
    except ValueError as error:
        raise BadRequest(f"{of.env}: {error}", of.key) from error
    return key_values(items, of.env) if of.is_mapping else items


def _as_text(value: Any) -> Any:
    """Return numbers and truth values as text, as in ``program-args: {min_send: 64}``; YAML reads them as numbers."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
