"""vLLM's own check of an engine's flags, before any process of the engine starts.

The command is ``python -m tercet.vllm_plugin.start.flags FLAGS``, with vLLM's flags. It makes the configuration of the
engine and loads no weights; flags that vLLM refuses end it with one sentence and exit code 2.
"""

from __future__ import annotations

from typing import Any


def read_flags(description: str) -> Any:
    """Return the flags of this process, as an engine's server reads them; wrong ones end it with one sentence."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tercet.vllm_plugin.differences import cli_args
    from tercet.vllm_plugin.start.process_output import refuse_in_a_sentence, refusing_in_a_sentence, without_noise

    without_noise()
    refuse_in_a_sentence()
    options: Any = cli_args()
    with refusing_in_a_sentence():
        args = options.make_arg_parser(FlexibleArgumentParser(description=description)).parse_args()
        options.validate_parsed_serve_args(args)
    return args


def main() -> None:
    """Make the configuration as an engine's server does before it starts its core."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from tercet.vllm_plugin.start.process_output import refusing_in_a_sentence

    args = read_flags("An engine's flags.")
    with refusing_in_a_sentence():
        # The configuration looks up parsers by name, so the user's must be known first, as in vLLM's own server.
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        AsyncEngineArgs.from_cli_args(args).create_engine_config()


if __name__ == "__main__":
    main()
