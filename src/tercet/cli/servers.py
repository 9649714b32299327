"""``tercet router``: run the router in the foreground."""

from __future__ import annotations

import msgspec
import typer

from tercet.cli.setting_flags import VLLM_FLAGS, settings_command
from tercet.cli.terminal import note
from tercet.logs import saying_while
from tercet.settings import RouterConfig


@settings_command(RouterConfig, rest="router-args")
def router(config: RouterConfig) -> None:
    """Run the router: one OpenAI endpoint for running engines.

    The router waits for engines that are still loading. Flags after `--` go to vLLM's OpenAI layer (chat template, tool
    parsers, API keys, ...).

    Examples:
    - `tercet router --engine http://127.0.0.1:8001,role=prefill --engine http://127.0.0.1:8002,role=decode`
    - `tercet router --engine http://10.0.0.5:8001,name=a --program data_parallel -- --api-key KEY`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --program mine.py:split --dev`
    - `tercet router --engine http://127.0.0.1:8001,label.zone=a --scheduling my.yaml --program-arg pick=scheduled`
    - `tercet router --engine http://127.0.0.1:8001 --max-in-flight-per-engine 64 --max-queued 200 --queue-timeout 10`
    - `tercet router --endpoint-selector app=vllm`, in a pod of Kubernetes
    - `tercet router --config router.yaml`, with lines such as `engines: [http://127.0.0.1:8001]`
    """
    from tercet.cluster.model import known_model, resolve_model, resolve_tokenizer
    from tercet.cluster.ports import require_free
    from tercet.cluster.up_config import require_usable_router
    from tercet.cluster.vllm_flags import check_flags
    from tercet.wire.client import engine_tls

    check_flags(config.vllm_args, VLLM_FLAGS)
    require_usable_router(config)
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    known = known_model(config.model)
    require_free(config.host, config.port)
    model = resolve_tokenizer(known) if config.serves_without_vllm else resolve_model(known, note)
    config = msgspec.structs.replace(config, model=model, served_model_name=config.public_name)
    if config.workers > 1:
        from tercet.router.workers import supervise

        raise typer.Exit(supervise(config))
    with saying_while("importing the router", note):
        from tercet.router.server import serve

    serve(config)
