"""``tercet conformance``: check whether an engine keeps the protocol of the verbs."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from tercet.cli.terminal import progress, say
from tercet.settings import SECRET_VARIABLE, require_url


def conformance(
    url: Annotated[str, typer.Argument(metavar="URL", help="The engine to check, such as http://127.0.0.1:8001.")],
    peer: Annotated[
        str | None, typer.Option(metavar="URL", help="A second engine of the same model, for checks of KV transfers.")
    ] = None,
    secret: Annotated[
        str, typer.Option(envvar=SECRET_VARIABLE, help="Secret that the engines require.", show_default="none")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="Make this check, and `status` before it. Repeatable.")
    ] = None,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for an answer, or for blocks to be free.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check over HTTP whether an engine keeps the protocol of the verbs.

    For authors of engines other than vLLM with Tercet's plugin. Each check is about one promise of the protocol; for a
    failed one, the command prints what was sent, what came, and what to do. The engines must have no other callers
    meanwhile, and should compute in float32: in bfloat16, equal KV may give other tokens. Without `--peer` the checks
    that need a second engine are skipped. The exit code is 0 if no check failed.

    Examples:
    - `tercet conformance http://127.0.0.1:8001`
    - `tercet conformance http://127.0.0.1:8001 --peer http://127.0.0.1:8002`
    - `tercet conformance http://127.0.0.1:8001 --peer http://127.0.0.1:8002 --only kv-arrives --only late-writes`
    """
    from tercet_checks.conformance import run_checks

    require_url(url, "URL")
    if peer is not None:
        require_url(peer, "--peer")
    with progress(f"checking {url}") as update:
        results = asyncio.run(
            run_checks(url, peer, secret, patience, only or (), lambda each: update(f"{each.state}: {each.check}"))
        )
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"url": url, "peer": peer, "checks": results})))
    else:
        # A row for each check, then what failed, next to the shell's prompt.
        width = max(len(each.check) for each in results)
        for each in results:
            say(f"{each.state:7}  {each.check:{width}}  {each.what if each.state == 'skipped' else each.promise}")
        for each in results:
            if each.state == "failed":
                say(f"\n{each.check}: {each.what}")
                for name in ("promise", "sent", "came", "remedy"):
                    say(f"  {name:7}  {getattr(each, name)}")
        counts = [
            f"{sum(each.state == state for each in results)} {state}" for state in ("passed", "failed", "skipped")
        ]
        say(f"\n{', '.join(counts)}")
    if any(each.state == "failed" for each in results):
        raise typer.Exit(1)
