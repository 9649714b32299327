"""The registry of hooks: it holds for the vLLM installed, notices each change, and lists all that is replaced."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector as VLLMsMultiConnector
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu_worker import Worker

import tercet.router.openai
import tercet.vllm_plugin
from tercet.router.openai.program_client import RouterLLM
from tercet.router.openai.router_renderer import BoundedTexts, RouterRenderer, ShortPrompts
from tercet.vllm_plugin import hooks
from tercet.vllm_plugin.hooks import (
    SIDES,
    SUPPORTED,
    Code,
    Expectation,
    Has,
    Hook,
    OneOf,
    Side,
    Takes,
    UnsupportedVLLM,
    hooks_of,
    is_supported,
    require_hooks,
    resolve,
    vllm_version,
)
from tercet.vllm_plugin.siblings import MultiConnector
from tercet.vllm_plugin.start import process_output
from tercet.wire.serving.client_connection import BoundedProtocol, StreamingProtocol

HERE: list[Side] = [side for side in SIDES if is_supported(side, vllm_version())]
HOOKS = [hook for side in HERE for hook in hooks_of(side)]


def leaves(expectations: Iterable[Expectation]) -> Iterator[Any]:
    """The expectations of one target each, of which others are made."""
    for expectation in expectations:
        if isinstance(expectation, OneOf):
            yield from leaves(expectation.expectations)
        else:
            yield expectation


LEAVES = [
    pytest.param(hook, leaf, id=f"{hook.name}: {type(leaf).__name__} {leaf.target}")
    for hook in HOOKS
    for leaf in leaves(hook.relies_on)
]


@pytest.fixture(autouse=True)
def _unchecked() -> None:
    require_hooks.cache_clear()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_every_hook_fits_the_vllm_installed(hook: Hook) -> None:
    assert hook.check() == []


def changed(leaf: Any) -> Any:
    """Something that is not what a target was: without its attributes, parameters or code."""

    def other() -> None: ...

    class Other: ...

    if isinstance(leaf, Has):
        return Other
    return other if leaf.names else None


@pytest.mark.parametrize(("hook", "leaf"), LEAVES)
def test_every_check_fails_when_its_target_changes(hook: Hook, leaf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if leaf.unmet():
        pytest.skip("another version's form of it")
    module, _, path = leaf.target.partition(":")
    owner, _, name = path.rpartition(".")
    where = resolve(f"{module}:{owner}") if owner else importlib.import_module(module)
    monkeypatch.setattr(where, name, changed(leaf))
    assert leaf.target in leaf.unmet()
    alternatives = [one for one in hook.relies_on if isinstance(one, OneOf) and leaf in one.expectations]
    assert hook.check() or any(not one.unmet() for one in alternatives)


@pytest.mark.parametrize("side", SIDES)
def test_one_error_lists_all_that_does_not_match(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Side) -> tuple[Hook, ...]:
        relies_on = (Takes("json:dumps", "colour"), Has("json:JSONDecoder", "shape"), Code("json:loads", "magic"))
        return Hook("one", "", "", "", relies_on), Hook("two", "", "", "", (Takes("nowhere:at_all"),))

    monkeypatch.setattr(hooks, "hooks_of", broken)
    monkeypatch.setattr(hooks, "vllm_version", lambda: "0.32.0")
    with pytest.raises(UnsupportedVLLM) as caught:
        require_hooks(side)
    for part in (
        "one: json:dumps has no parameter colour",
        "JSONDecoder has no shape",
        "`magic`",
        "two: nowhere:at_all",
        *SUPPORTED[side],
    ):
        assert part in caught.value.message


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "0.3", "1.32.0", "0.320"])
def test_other_versions_are_refused_with_the_list(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "vllm_version", lambda: version)
    with pytest.raises(UnsupportedVLLM, match=rf"{version} is not supported; an engine supports 0.31.x, 0.32.x"):
        require_hooks("engine")


def test_a_router_may_refuse_what_an_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "vllm_version", lambda: "0.33.0")
    monkeypatch.setitem(SUPPORTED, "frontend", ("0.31", "0.32"))
    with pytest.raises(UnsupportedVLLM, match=r"0.33.0 is not supported; a router supports 0.31.x, 0.32.x\."):
        require_hooks("frontend")


def test_a_fast_path_that_does_not_fit_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "vllm_version", lambda: "0.34.0")
    with pytest.raises(UnsupportedVLLM, match=r"the streaming fast path supports .*, or start with --fast-path off"):
        require_hooks("fast path")


def test_the_table_says_what_does_not_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    assert hooks.main(HERE) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for hook in HOOKS for word in hook.name.split())
    monkeypatch.setattr("vllm.v1.core.block_pool.BlockPool.touch", None)
    assert hooks.main(["engine"]) == 1
    assert "touch cannot be called" in " ".join(capsys.readouterr().out.split())


# ---- what is changed: in place, in subclasses, on copies ---------------------------------------------------------


def pairs_of(node: ast.Assign) -> Iterator[tuple[Any, Any]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def is_foreign(target: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(target, ast.Attribute) and getattr(target.value, "id", "") != "self"


def is_code(value: ast.AST, functions: set[str]) -> bool:
    if isinstance(value, ast.Call):
        return getattr(value.func, "id", "") == "staticmethod"
    return isinstance(value, ast.Lambda) or getattr(value, "id", "") in functions


def is_copy(value: ast.AST) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "copy.copy"


def changed_in(source: str) -> tuple[list[str], list[str]]:
    """Names of attributes that a module sets to functions of its own, ``*`` where a variable names them.

    First those of objects of others, then those of variables that are copies.
    """
    tree = ast.parse(source)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assigned = [pair for node in ast.walk(tree) if isinstance(node, ast.Assign) for pair in pairs_of(node)]
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    assigned += [(node.target, node.value) for node in typed if node.value is not None]
    copied = {getattr(target, "id", "") for target, value in assigned if is_copy(value)}
    replaced = [
        str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else "*"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "wrap")
    ]
    on_copies: list[str] = []
    for target, value in assigned:
        if is_foreign(target) and getattr(target.value, "id", "") in copied:
            on_copies.append(target.attr)
        elif is_foreign(target) and is_code(value, functions):
            replaced.append(target.attr)
    return replaced, on_copies


def listed(kind: str) -> set[str]:
    """The attributes of a kind that the registry lists, without their owners."""
    changed = (getattr(hook, kind) for side in SIDES for hook in hooks_of(side))
    return {attribute.rpartition(".")[2] for attributes in changed for attribute in attributes}


def test_the_search_for_replacements_finds_them() -> None:
    patches = "x.put = f; x.a, x.b = f, 1; setattr(C, m.__name__, m); C.s = staticmethod(f); self.g = f"
    copies = "y, z = copy.copy(x), 1; y.a, y.client = f, g(x); z.b = f; v: Any = copy.copy(x); v.app = y"
    replaced, on_copies = changed_in(f"def f(): ...\n{patches}\n{copies}")
    assert sorted(replaced) == sorted(["put", "a", "*", "s", "b"])
    assert on_copies == ["a", "client", "app"]


def test_all_that_is_replaced_is_in_the_registry() -> None:
    rooms = [Path(room.__path__[0]) for room in (tercet.vllm_plugin, tercet.router.openai)]
    helper = rooms[0] / "hooks.py"
    assert changed_in(helper.read_text()) == (["*", "*"], []), "only what wrap sets, in the names of others"
    files = [path for room in rooms for path in room.rglob("*.py") if path != helper]
    found = {path: changed_in(path.read_text()) for path in files}
    replaced = {name for names, _ in found.values() for name in names}
    assert replaced <= listed("replaces") | {"*"}
    assert {path.name for path, (names, _) in found.items() if "*" in names} <= {"core_methods.py"}
    assert {"put", "update_scheduler_stats", "_sample", "wait"} <= replaced
    assert {name for _, names in found.values() for name in names} == listed("copies")


def test_all_that_subclasses_override_is_in_the_registry() -> None:
    pairs: list[tuple[type, type]] = [
        (BoundedTexts, BaseRenderer),
        (ShortPrompts, BaseRenderer),
        (RouterRenderer, BaseRenderer),
        (RouterLLM, AsyncLLM),
        (BoundedProtocol, HttpToolsProtocol),
        (StreamingProtocol, HttpToolsProtocol),
        (MultiConnector, VLLMsMultiConnector),
        (getattr(process_output, "vllm:v1:worker:gpu_worker:Worker"), Worker),
    ]
    interfaces = {Worker: "WorkerBase"}
    overridden = {
        f"{interfaces.get(vllms, vllms.__name__)}.{name}"
        for ours, vllms in pairs
        for name, value in vars(ours).items()
        if inspect.isfunction(value) and hasattr(vllms, name) and name != "__init__"
    }
    made_with_the_object = {"BaseRenderer.__init__", "BaseRenderer._tokenize_prompt_async"}
    changed = {name for side in SIDES for hook in hooks_of(side) for name in hook.overrides}
    assert overridden == changed - made_with_the_object


def test_the_three_kinds_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(HERE)
    printed = " ".join(capsys.readouterr().out.split())
    assert "engine: queue readers" in printed
    assert all(kind in printed for kind in ("in a subclass:", "on a copy:"))


@pytest.mark.parametrize("target", ["builtins:len", "math:pi"])
def test_what_cannot_be_looked_at_is_said(target: str) -> None:
    assert Code(target, "x").unmet().startswith(f"{target} cannot be checked")


def test_why_vllm_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.import_error() == ""
    monkeypatch.setattr(hooks, "FIRST_IMPORTED", "vllm.nowhere")
    assert hooks.import_error() == "ModuleNotFoundError: No module named 'vllm.nowhere'"
