"""``tercet program``: show and change a running router's programs and scheduling file; its flags, calls and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.cli.router_calls import Json, RunningRouter, show_answer, text_of
from tercet.cli.setting_flags import flags_as_records
from tercet.protocol import BadRequest
from tercet.settings import key_values, read_yaml


@dataclass(frozen=True)
class ProgramChange:
    """The programs that the router is to use: one program, a split of the traffic, or a file of either."""

    programs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM...",
            help="Built-in program, or `file.py:function`. One or more PROGRAM=WEIGHT split the traffic; weights need "
            "not sum to 100.",
            show_default=False,
        ),
    ] = None
    program_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Parameter of the program; in a split PROGRAM:KEY=VALUE. Repeatable."),
    ] = None
    by_header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HEADER=VALUE,PROGRAM",
            help="Rule: requests with this header use PROGRAM, not the split. Repeatable.",
        ),
    ] = None
    by_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL,PROGRAM", help="Rule: requests with this model name use PROGRAM, not the split. Repeatable."
        ),
    ] = None
    sticky: Annotated[
        str | None,
        typer.Option(
            metavar="HEADER", help="Header for the split: requests with the same value of it get the same program."
        ),
    ] = None
    plan: Annotated[
        Path | None, typer.Option(help="JSON or YAML file with `program` and `args`, or `split`, `rules`, `sticky`.")
    ] = None

    def body(self) -> dict[str, Any] | None:
        """Return the body of the call that changes programs, or None if nothing is to be changed.

        Raises :class:`~tercet.protocol.BadRequest`.
        """
        flags = {
            "--program-arg": self.program_arg, "--by-header": self.by_header, "--by-model": self.by_model,
            "--sticky": self.sticky,
        }  # fmt: skip
        programs, given = self.programs or [], [flag for flag, value in flags.items() if value]
        if self.plan is not None:
            if programs:
                raise BadRequest("PROGRAM: cannot be combined with --plan", "PROGRAM")
            if given:
                raise BadRequest(f"{given[0]}: cannot be combined with --plan; write it into the plan", given[0])
            return dict(read_yaml(self.plan, "--plan").values)
        if not programs:
            if given:
                raise BadRequest(f"{given[0]}: needs PROGRAM", given[0])
            return None
        if len(programs) > 1 or "=" in programs[0]:
            return self._split(programs)
        if of_a_split := [flag for flag in given if flag != "--program-arg"]:
            raise BadRequest(f"{of_a_split[0]}: needs a split; give PROGRAM=WEIGHT", of_a_split[0])
        return {**_called(programs[0]), "args": key_values(self.program_arg, "--program-arg")}

    def _split(self, shares: Sequence[str]) -> dict[str, Any]:
        args: dict[str, dict[str, str]] = {}  # by program
        for key, value in key_values(self.program_arg or (), "--program-arg").items():
            name, colon, parameter = key.rpartition(":")
            if not colon:
                why = "must name its program in a split: PROGRAM:KEY=VALUE"
                raise BadRequest(f"--program-arg: {key!r} {why}", "--program-arg")
            args.setdefault(name, {})[parameter] = value
        body: dict[str, Any] = {
            "split": [{**_arm(name, args), "weight": weight} for name, weight in map(_share, shares)],
            "rules": [
                *({**_arm(name, args), **_header(of)} for of, name in _rules(self.by_header or (), "--by-header")),
                *({**_arm(name, args), "model": of} for of, name in _rules(self.by_model or (), "--by-model")),
            ],
        }
        given = {arm["program"] for arms in body.values() for arm in arms}
        # A mistyped program name in an argument would otherwise have no effect.
        if unused := [name for name in args if _located(name) not in given]:
            raise BadRequest(f"--program-arg: {min(unused)} is not in the split", "--program-arg")
        return body if self.sticky is None else {**body, "sticky": self.sticky}


@flags_as_records
def program(
    change: ProgramChange,
    scheduling: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Scheduling file to use or reload; on this machine, or on the router's machine."
        ),
    ] = None,
    by_path: Annotated[
        bool,
        typer.Option(
            "--by-path", help="Send a file's path instead of its text: the router reads it, below its `--admin-folder`."
        ),
    ] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show or change the program of a running router, and its scheduling file.

    Without PROGRAM, `--plan` and `--scheduling` the command shows both. A running request keeps its program until its
    end. The text of a file that exists here is sent; the program gets the name that you write. If a file does not load,
    nothing changes. The router's machine must have the plugins that a scheduling file names.

    Examples:
    - `tercet program`
    - `tercet program balanced --program-arg balance_ratio=0.2`
    - `tercet program mine.py:split`
    - `tercet program disaggregated=90 balanced=10`
    - `tercet program disaggregated=1 mine.py:split=1 --program-arg mine.py:split:share=0.8 --sticky x-user`
    - `tercet program disaggregated=1 --by-header x-team=search,data_parallel`
    - `tercet program --plan plan.yaml`
    - `tercet program --scheduling scheduling.yaml`
    """
    body = change.body()
    if by_path and body is None and scheduling is None:
        raise BadRequest("--by-path: needs PROGRAM, --plan or --scheduling", "--by-path")
    if body is not None and not by_path:
        send_sources(body)
    answers: dict[str, Any] = {}
    if scheduling is not None:
        here = Path(scheduling).expanduser()  # another path is one of the router's machine
        file = {"file": str(here.absolute()) if here.is_file() else scheduling}
        if here.is_file() and not by_path:
            file["content"] = text_of(here, "--scheduling")
        answers["scheduling"] = router.ask("PUT", "/scheduling", file)
    if body is not None:
        answers["program"] = router.ask("PUT", "/program", body)
    if not answers:
        answers = {part: router.ask("GET", f"/{part}") for part in ("program", "scheduling")}
    show_answer(answers, as_json, _in_words)


def _in_words(answers: dict[str, Any]) -> Iterator[str]:
    if "program" in answers:
        yield from state_in_words(answers["program"])
    if (state := answers.get("scheduling")) is None:
        return
    yield f"scheduling file: {state['file'] or 'none'}"
    for name, profile in state["profiles"].items():
        roles = [role for role, used in state["by_role"].items() if used == name]
        scorers = [f"{scorer} x {weight:g}" for scorer, weight in profile["scorers"].items()]
        parts = [*profile["filters"], *scorers, profile["picker"]]
        yield f"  {name} ({', '.join(roles) or 'no role'}): {', '.join(parts)}"


def send_sources(body: dict[str, Any]) -> None:
    """Add to the plan the text of each file that exists here; the router reads the other files, if it is allowed to."""
    for arm in (body, *_arms(body.get("split")), *_arms(body.get("rules"))):
        name = arm.get("program")
        if not isinstance(name, str) or "source" in arm:
            continue
        path, colon, _ = name.rpartition(":")
        # The text is sent, since the router may run on another machine, or may not read files at all.
        if colon and (file := Path(path).expanduser()).is_file():
            arm["source"] = text_of(file, "PROGRAM")
        elif name.endswith(".py") and (file := Path(name).expanduser()).is_file():
            from tercet.programs.loading import without_function

            raise without_function(name, text_of(file, "PROGRAM"), "PROGRAM")


def _arms(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []  # pyright: ignore


def _located(name: str) -> str:
    """Return ``file.py:function`` with the file's full path if the file exists here, else ``name``."""
    path, colon, function = name.rpartition(":")
    file = Path(path).expanduser()
    return f"{file.absolute()}:{function}" if colon and file.is_file() else name


def _called(name: str) -> dict[str, Any]:
    """Return the fields of a program: its location, and the written name if it differs."""
    located = _located(name)
    return {"program": located} if located == name else {"program": located, "name": name}


def _share(item: str) -> tuple[str, float]:
    name, equals, weight = item.rpartition("=")
    try:
        if not equals or not name:
            raise ValueError
        return name, float(weight)
    except ValueError:
        raise BadRequest(
            f"PROGRAM=WEIGHT: {item!r} must be a program and a number, such as disaggregated=90", "PROGRAM=WEIGHT"
        ) from None


def _rules(given: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
    for item in given:
        of, comma, name = item.rpartition(",")
        if not comma or not of or not name:
            raise BadRequest(f"{flag}: {item!r} must end with a comma and a program", flag)
        yield of, name


def _header(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    return {"header": name, "value": value} if equals else {"header": name}


def _arm(name: str, args: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    given = {key: value for of, each in args.items() if _located(of) == _located(name) for key, value in each.items()}
    return {**_called(name), "args": given}


def state_in_words(state: dict[str, Any]) -> Iterator[str]:
    """Return lines about the programs in use and the previous version."""
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
    for rule in version.get("rules", ()):
        header = f"{rule['header']}={rule['value']}" if "value" in rule else rule.get("header")
        model = f"model={rule['model']}" if "model" in rule else None
        words.append(f"{_arm_in_words(rule)} where {' and '.join(filter(None, (header, model)))}")
    return ", ".join(words)


def _arm_in_words(arm: dict[str, Any]) -> str:
    args = ", ".join(f"{key}={value}" for key, value in arm.get("args", {}).items())
    return f"{arm.get('name') or arm['program']}({args})" if args else arm.get("name") or arm["program"]
