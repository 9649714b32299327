"""Flags that several commands have, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tercet.cluster.vllm_flags import check_flags

Model = Annotated[
    str, typer.Option(help="`smollm2` (built in), a checkpoint's directory, or any hub id that vLLM takes.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="As vLLM's. float32 for token-exact comparisons.",
        show_default="bfloat16; float32 on CPUs without instructions for that",
    ),
]
ServedModelName = Annotated[str | None, typer.Option(help="The model's name in the OpenAI API.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
ProgramArg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A parameter of the program; repeatable.")
]
VLLMArgs = Annotated[list[str] | None, typer.Argument(metavar="-- VLLM FLAGS", help="Passed on to vLLM as they are.")]


def vllm_flags(given: Sequence[str] | None) -> tuple[str, ...]:
    """What stood after ``--``; raises :class:`~tercet.protocol.BadRequest` for what cannot be passed on."""
    flags = tuple(given or ())
    check_flags(flags, "vLLM flags after --")
    return flags
