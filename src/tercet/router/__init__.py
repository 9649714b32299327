"""The router: vLLM's OpenAI server over an engine-core client that runs programs.

Chat templates, detokenisation, stop strings, logprobs, usage, tool and reasoning parsers and the error format are
vLLM's, put together in :mod:`tercet.vllm_plugin.frontend`. :mod:`.router` is what every request passes first,
:mod:`.service` runs a program for each sequence; :mod:`.server` puts it together.
"""

from tercet.settings import RouterConfig

__all__ = ["serve"]


def serve(config: RouterConfig) -> None:
    """Run the router until it is told to stop; imports vLLM, which takes seconds, unless the small API serves."""
    from tercet.router.server import serve as serve_with_vllm

    serve_with_vllm(config)
