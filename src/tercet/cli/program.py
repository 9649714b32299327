"""``tercet program``: which programs a running router uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.cli.fleet_commands import HERE, AdminKey, ByPath, Json, Url, ask, show_answer, text_of
from tercet.cli.setting_flags import ProgramArg
from tercet.protocol import BadRequest
from tercet.settings import key_values, read_yaml

program = typer.Typer(name="program", no_args_is_help=True, help="Show and change the programs of a running router.")


@program.command()
def show(url: Url = HERE, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Which programs run, since which version, and whether one of them fails."""
    show_answer(ask(url, admin_key, "GET", "/program"), as_json, state_in_words)


@program.command("set")
def set_program(
    name: Annotated[
        str | None, typer.Argument(metavar="PROGRAM", help="A built-in one, or `file.py:function`.", show_default=False)
    ] = None,
    program_arg: ProgramArg = None,
    plan: Annotated[
        Path | None, typer.Option(help="A JSON or YAML file: `program` and `args`, or `split`, `rules`, `sticky`.")
    ] = None,
    by_path: ByPath = False,
    url: Url = HERE,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Serve requests from now on by one program, or by a plan from a file.

    Requests under way end under the program that they began with. A file that exists here is sent as it is now; the
    program is called what you write.

    Examples:
    - `tercet program set balanced --program-arg balance_ratio=0.2`
    - `tercet program set mine.py:split`
    - `tercet program set --plan plan.yaml`
    """
    if (name is None) == (plan is None):
        raise BadRequest("PROGRAM: give a program, or a file with --plan", "PROGRAM")
    if plan is not None and program_arg:
        raise BadRequest("--program-arg: goes with PROGRAM; in a plan each program has args", "--program-arg")
    args = key_values(program_arg, "--program-arg")
    body = dict(read_yaml(plan, "--plan").values) if plan is not None else {**_called(str(name)), "args": args}
    if not by_path:
        send_sources(body)
    show_answer(ask(url, admin_key, "PUT", "/program", body), as_json, state_in_words)


@program.command()
def split(
    shares: Annotated[list[str], typer.Argument(metavar="PROGRAM=WEIGHT...", help="Weights need not sum to 100.")],
    program_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="PROGRAM:KEY=VALUE", help="A parameter of one of the programs; repeatable."),
    ] = None,
    by_header: Annotated[
        list[str] | None,
        typer.Option(metavar="HEADER=VALUE,PROGRAM", help="Requests that do not take part in the split; repeatable."),
    ] = None,
    by_model: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL,PROGRAM", help="The same, by the name that they give the model; repeatable."),
    ] = None,
    by_path: ByPath = False,
    sticky: Annotated[
        str | None, typer.Option(metavar="HEADER", help="Requests with the same value of it get the same program.")
    ] = None,
    url: Url = HERE,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Share the traffic between programs, by weight.

    Examples:
    - `tercet program split disaggregated=90 balanced=10`
    - `tercet program split disaggregated=1 mine.py:split=1 --program-arg mine.py:split:share=0.8 --sticky x-user`
    - `tercet program split disaggregated=1 --by-header x-team=search,data_parallel`
    """
    args = _args_of_each(program_arg or ())
    body: dict[str, Any] = {
        "split": [{**_arm(name, args), "weight": weight} for name, weight in map(_share, shares)],
        "rules": [
            *({**_arm(name, args), **_header(of)} for of, name in _rules(by_header, "--by-header")),
            *({**_arm(name, args), "model": of} for of, name in _rules(by_model, "--by-model")),
        ],
    }
    given = {arm["program"] for arms in body.values() for arm in arms}
    if unused := [name for name in args if _located(name) not in given]:
        raise BadRequest(f"--program-arg: {min(unused)} is not in the split", "--program-arg")
    if sticky is not None:
        body["sticky"] = sticky
    if not by_path:
        send_sources(body)
    show_answer(ask(url, admin_key, "PUT", "/program", body), as_json, state_in_words)


# ---- reading -------------------------------------------------------------------------------------------------


def send_sources(body: dict[str, Any]) -> None:
    """Have the plan carry the text of each file that exists here; the router reads the others, if it may."""
    for arm in (body, *_arms(body.get("split")), *_arms(body.get("rules"))):
        name = arm.get("program")
        if not isinstance(name, str) or "source" in arm:
            continue
        path, colon, _ = name.rpartition(":")
        if colon and (file := Path(path).expanduser()).is_file():
            arm["source"] = text_of(file, "PROGRAM")


def _arms(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []  # pyright: ignore


def _located(name: str) -> str:
    """``file.py:function`` by the file's full path, if there is such a file here."""
    path, colon, function = name.rpartition(":")
    file = Path(path).expanduser()
    return f"{file.absolute()}:{function}" if colon and file.is_file() else name


def _called(name: str) -> dict[str, Any]:
    """A program, under the name that was written for it."""
    located = _located(name)
    return {"program": located} if located == name else {"program": located, "name": name}


def _share(item: str) -> tuple[str, float]:
    name, equals, weight = item.rpartition("=")
    try:
        if not equals or not name:
            raise ValueError
        return name, float(weight)
    except ValueError:
        raise BadRequest(f"PROGRAM=WEIGHT: {item!r} is not, for example, disaggregated=90", "PROGRAM=WEIGHT") from None


def _rules(given: Sequence[str] | None, flag: str) -> Iterator[tuple[str, str]]:
    for item in given or ():
        of, comma, name = item.rpartition(",")
        if not comma or not of or not name:
            raise BadRequest(f"{flag}: {item!r} has no program after a comma", flag)
        yield of, name


def _header(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    return {"header": name, "value": value} if equals else {"header": name}


def _args_of_each(given: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key, value in key_values(given, "--program-arg").items():
        name, colon, parameter = key.rpartition(":")
        if not colon:
            raise BadRequest(f"--program-arg: {key!r} does not say whose: PROGRAM:KEY=VALUE", "--program-arg")
        found.setdefault(name, {})[parameter] = value
    return found


def _arm(name: str, args: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    given = {key: value for of, each in args.items() if _located(of) == _located(name) for key, value in each.items()}
    return {**_called(name), "args": given}


# ---- showing -------------------------------------------------------------------------------------------------


def state_in_words(state: dict[str, Any]) -> Iterator[str]:
    """The programs in use, and what became of those before."""
    yield f"version {state['version']}: {_plan_in_words(state)}"
    for name, count in state["failures_in_a_row"].items():
        yield f"  {name} failed on its last {count} requests"
    if returned := state["returned"]:
        yield (
            f"  returned from version {returned['from_version']}: {returned['program']} failed {returned['failures']} "
            f"times in a row, the last time with {returned['error']}"
        )
    if before := state["previous"]:
        yield f"  before: version {before['version']}: {_plan_in_words(before)}"


def _plan_in_words(version: dict[str, Any]) -> str:
    shares: list[dict[str, Any]] = version.get("split") or [version]
    total = sum(share.get("weight", 1.0) for share in shares)
    words = [
        _arm_in_words(share) + (f" {share.get('weight', 1.0) / total:.1%}" if version.get("split") else "")
        for share in shares
    ]
    words += [f"{_arm_in_words(rule)} where {_condition(rule)}" for rule in version.get("rules", ())]
    return ", ".join(words)


def _arm_in_words(arm: dict[str, Any]) -> str:
    args = ", ".join(f"{key}={value}" for key, value in arm.get("args", {}).items())
    return f"{arm.get('name') or arm['program']}({args})" if args else arm.get("name") or arm["program"]


def _condition(rule: dict[str, Any]) -> str:
    header = f"{rule['header']}={rule['value']}" if "value" in rule else rule.get("header")
    model = f"model={rule['model']}" if "model" in rule else None
    return " and ".join(filter(None, (header, model)))
