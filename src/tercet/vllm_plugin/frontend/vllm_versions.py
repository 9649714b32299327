"""What the versions of vLLM that are supported have in another form each, for the router's process."""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import MutableSequence
from typing import Any


def parsed_serve_args(argv: list[str]) -> Namespace:
    """``argv`` as ``vllm serve`` parses and validates it; since vLLM 0.33 the parser is in another package."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        options: Any = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:
        options = importlib.import_module("vllm.entrypoints.common.cli_args")
    args: Namespace = options.make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    options.validate_parsed_serve_args(args)
    return args


def structured_outputs_config(engine_args: Any) -> Any:
    """The structured outputs' config with the parsers' options in it, which vLLM 0.31 leaves out."""
    create = getattr(engine_args, "create_structured_outputs_config", None)
    if create is not None:
        return create()
    config = engine_args.structured_outputs_config
    if engine_args.reasoning_parser:
        config.reasoning_parser = engine_args.reasoning_parser
    if engine_args.reasoning_parser_plugin:
        config.reasoning_parser_plugin = engine_args.reasoning_parser_plugin
    return config


def accept_by_load(loads: MutableSequence[int], index: int) -> dict[str, Any]:
    """Options of ``serve_http`` that let the least loaded of several workers take a connection.

    In vLLM 0.31 there are none, and the system chooses.
    """
    from vllm.entrypoints.launchers.launcher import serve_http

    known = inspect.signature(serve_http).parameters
    return {"peer_loads": (loads, index)} if "peer_loads" in known else {}
