"""Loading of programs, by name or as ``file.py:function``, with their parameters."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from tercet.aio.files import read_whole
from tercet.aio.tasks import keep_cancellation_counts
from tercet.decisions.scheduling.assembly import Locate, load_module, user_file
from tercet.programs import patterns
from tercet.programs.patterns import Answer
from tercet.protocol import BadRequest, Fleet, Request
from tercet.settings.declaration import complaint

# Number of functions of a file that an error lists.
LISTED = 5
Program = Callable[[Request, Fleet], Answer]
BUILT_IN: Mapping[str, Callable[..., Answer]] = {
    name: getattr(patterns, name)
    for name in ("auto", "balanced", "cache_bypass", "conditional", "data_parallel", "disaggregated", "fetch")
}


def load_program(
    name: str | Callable[..., Answer],
    args: Mapping[str, Any] | None = None,
    source: str | None = None,
    locate: Locate = user_file,
) -> Program:
    """Return the program called ``name``: a built-in one, ``path/to/file.py:function``, or the function itself.

    ``args`` are its keyword parameters, also as text. They are converted to the types in its signature; a parameter
    that is a function is loaded from ``file.py:function``. ``source`` is the text of the file; if given, the file is
    not read. ``locate`` finds the files to read. Raises :class:`~tercet.protocol.BadRequest` that explains an error in
    the name, the file or a parameter.
    """
    keep_cancellation_counts()
    if not isinstance(name, str):
        function, name = name, str(getattr(name, "__name__", type(name).__name__))
    elif source is None and name in BUILT_IN:
        function = BUILT_IN[name]
    else:
        function = _from_file(name, locate, source)
    if not inspect.isasyncgenfunction(function):
        raise BadRequest(f"program: {name} is not an async generator (async def with yield)", "program")
    given = _convert(name, function, args or {}, locate)
    try:
        inspect.signature(function).bind(None, None, **given)
    except TypeError as error:
        needs = f"{name} must accept a request, a fleet and these arguments: {error}"
        raise BadRequest(f"program: {needs}; give parameters by program-arg, or defaults", "program") from error
    return partial(function, **given)


def name_of(program: Program) -> str:
    """Return the name of a built-in program; for any other the name of its function, or of its class."""
    function = program.func if isinstance(program, partial) else program
    called = getattr(function, "__name__", type(function).__name__)
    return next((name for name, each in BUILT_IN.items() if each is function), called)


def _from_file(name: str, locate: Locate, source: str | None = None) -> Callable[..., Answer]:
    path, colon, function_name = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise without_function(name, read_whole(locate(name, "program")))
        known = ", ".join(sorted(BUILT_IN))
        raise BadRequest(f"program: there is no {name!r}; choose one of {known}, or file.py:function", "program")
    module = load_module(locate(path, "program") if source is None else Path(path), "program", source)
    function = getattr(module, function_name, None)
    if function is None:
        raise BadRequest(f"program: {path} has no function {function_name}", "program")
    return function


def without_function(path: str, text: str | bytes, field: str = "program") -> BadRequest:
    """Return the error for a file without a function's name; it lists the file's async generators."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return BadRequest(f"{field}: {path} cannot be read as Python: {error}", field)
    found = [
        f"{path}:{node.name}"
        for node in tree.body
        if isinstance(node, ast.AsyncFunctionDef) and any(isinstance(each, ast.Yield) for each in ast.walk(node))
    ]
    if not found:
        return BadRequest(f"{field}: {path} has no async generator (async def with yield)", field)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return BadRequest(f"{field}: name a function: {' or '.join(found[:LISTED])}{more}", field)


def _convert(name: str, function: Callable[..., Any], args: Mapping[str, Any], locate: Locate) -> dict[str, Any]:
    try:
        hints = get_type_hints(function)
    except Exception as error:  # the user's annotations are evaluated now
        raise BadRequest(
            f"program: {name}: cannot evaluate its annotations: {type(error).__name__}: {error}", "program"
        ) from error
    parameters = inspect.signature(function).parameters
    allowed = [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    converted: dict[str, Any] = {}
    for key, value in args.items():
        if key not in allowed:
            raise BadRequest(f"args: {name} has no parameter {key!r}; it takes {', '.join(allowed) or 'none'}", "args")
        kind = hints.get(key, str if isinstance(value, str) else Any)
        # A parameter that is annotated as a function, or as a function or None, gets file.py:function.
        if any(get_origin(each) is Callable for each in (kind, *get_args(kind))):
            converted[key] = _from_file(value, locate) if isinstance(value, str) else value
            continue
        try:
            converted[key] = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            raise complaint(f"args: {name}: {key}", kind, value, error, "args") from error
        except TypeError as error:  # the annotation is not a type
            raise BadRequest(f"args: {name}: {key}={value}: {error}", "args") from error
    return converted
