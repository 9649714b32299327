"""``tercet up``: a whole fleet on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from tercet.cli.fleet_run import run_fleet, say
from tercet.cli.setting_flags import settings_command
from tercet.cluster.local import RunningFleet
from tercet.cluster.up_config import UpConfig
from tercet.scheduling import load_scheduling
from tercet.sim import load_profile


@settings_command(UpConfig, rest="engine-args")
def up(config: UpConfig) -> None:
    """Start engines and a front door, and stop all of them on Ctrl-C.

    CPU engines get cores of their own, GPU engines devices of their own. Flags after `--` go to every vLLM engine.

    Examples:
    - `tercet up`
    - `tercet up --prefill 0 --decode 0 --both 2 --program data_parallel --port 9000`
    - `tercet up --program mine.py:split --program-arg share=0.8 -- --max-num-seqs 32`
    - `tercet up --program mine.py:split --dev`
    - `tercet up --simulate llama-3.1-8b-h100-tp1 --prefill 2 --decode 6`
    - `tercet up --config up.yaml`, with lines such as `prefill: 2` and `engine-args: [--max-num-seqs, 32]`
    """
    if config.scheduling is not None:
        load_scheduling(Path(config.scheduling).expanduser())
    if config.simulate is not None:
        load_profile(config.simulate)
    run_fleet(config, lambda fleet: _stay(config, fleet))


async def _stay(config: UpConfig, fleet: RunningFleet) -> None:
    _announce(config, fleet)
    await fleet.until_broken(lambda name, state: say(f"{name} {state}"))


def _announce(config: UpConfig, fleet: RunningFleet) -> None:
    body = json.dumps({"model": config.public_name, "messages": [{"role": "user", "content": "Say hello."}]})
    width = max(len(engine.name) for engine in fleet.engines)
    say(f"\nready at {fleet.url}, model {config.public_name}, program {config.program}")
    for engine in fleet.engines:
        say(f"  {engine.name:{width}}  {engine.role:7}  {engine.url}")
    say(f"  logs: {fleet.log_dir}\n")
    say(f"  curl {fleet.url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    say("Ctrl-C stops everything.")
