"""The router: vLLM's OpenAI server over an engine-core client that runs programs.

vLLM provides chat templates, detokenisation, stop strings, logprobs, usage, tool and reasoning parsers and the error
format; :mod:`tercet.vllm_plugin.frontend` assembles them. Every request first passes :mod:`.router_app`.
:mod:`.service` runs a program for each sequence. :mod:`.server` assembles the router.
"""

from tercet.settings import RouterConfig

__all__ = ["serve"]


def serve(config: RouterConfig) -> None:
    """Run the router until a signal stops it; import vLLM, which takes seconds, unless the small API serves."""
    from tercet.router.server import serve as serve_with_vllm

    serve_with_vllm(config)
