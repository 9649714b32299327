"""``--simulate`` of ``tercet engine`` and ``tercet up``: one simulated engine in the foreground."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from tercet.cluster.engine_command import EngineSpec
from tercet.cluster.ports import url_of
from tercet.logs import log_as_the_environment_says
from tercet_lab.sim import EngineOptions, load_profile, options_from
from tercet_lab.sim.sim_server import ServerConfig
from tercet_lab.sim.sim_server import serve as serve_simulated


def require_usable(profile: str, options: Mapping[str, str]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a profile that cannot be loaded, or wrong options."""
    load_profile(profile)
    options_from(EngineOptions(), options)


def serve(spec: EngineSpec) -> None:
    """Serve a simulated engine; the router uses the model's tokenizer and its longest sequence."""
    profile = load_profile(spec.simulate or "")
    longest, checkpoint = profile.max_model_len, Path(spec.model) / "config.json"
    if checkpoint.is_file():  # vLLM enforces the model's longest sequence
        longest = min(longest, msgspec.json.decode(checkpoint.read_bytes()).get("max_position_embeddings") or longest)
    config = ServerConfig(
        name=spec.name,
        profile=msgspec.structs.replace(profile, max_model_len=longest),
        options=options_from(EngineOptions(stream_every=1), spec.options),
        host=spec.host,
        port=spec.port,
        url=url_of(spec.host, spec.port),
        model=spec.served_model_name,
        root=spec.model,
        prefill_hosts=spec.prefill_hosts,
    )
    log_as_the_environment_says("info")
    serve_simulated(config)
