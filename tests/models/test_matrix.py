"""Each family on two real engines: whatever is done with its KV, a request gets the tokens of one engine alone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol import Request
from tercet.wire.client import HttpEngine
from tests.engines.conftest import START_SECONDS, Fleet, free_port, get_json, settled, start_fleet
from tests.engines.moving import answer_of, moving, until
from tests.engines.processes import processes_of, send_signal
from tests.engines.prompts import BLOCK, alone, calls_of, complete, prompt_of, tokens_of

from .checkpoints import checkpoint, flags_of
from .families import FAMILIES, WINDOW, Family
from .record import Record, noted

TRACE = {"x-tercet-trace": "1"}
# Within a block, over the window's edge, at a block's, and in several steps.
LENGTHS = (5, BLOCK, WINDOW + 1, 2 * BLOCK + 40, 600)
# What programs send at least, if nobody says otherwise.
MIN_SEND = 32
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
SERVED = [name for name, family in FAMILIES.items() if not (family.refusal or family.not_on_cpu)]
REFUSED = [name for name, family in FAMILIES.items() if family.refusal]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@contextmanager
def running(name: str, tmp: Path) -> Generator[tuple[Fleet, str]]:
    """Two engines of a family behind a router, and what the model is called there."""
    args = ("--program-arg", "min_send=1", "--", "--max-model-len", "1024", "--max-num-batched-tokens", "256")
    fleet = start_fleet(tmp, *args, *flags_of(name), model=str(checkpoint(name)))
    try:
        yield fleet, get_json(f"{fleet.url}/v1/models")["data"][0]["id"]
    finally:
        fleet.stop()


@pytest.mark.parametrize("name", SERVED)
async def test_same_tokens_as_one_engine(name: str, tmp_path: Path) -> None:
    with noted(name) as record, running(name, tmp_path) as (fleet, model):
        block = get_json(f"{fleet.engine_url('decode')}/tercet/v1/status")["block_size"]
        expected = await _alone(fleet, model)
        await _programs(fleet, model, expected, block, record, FAMILIES[name])
        await _context(fleet, model, block, record, FAMILIES[name])
        await _moves(fleet, model, record)
        for role in ("prefill", "decode"):
            async with HttpEngine(role, fleet.engine_url(role)) as engine:
                await settled(engine)
        await _failover(fleet, model, record)


async def _alone(fleet: Fleet, model: str) -> dict[int, list[int]]:
    """What one engine says to each prompt: not always the same, so that the model looks at what it is given."""
    engine = fleet.engine_url("prefill")
    found = {length: await alone(engine, prompt_of(length), model=model, ignore_eos=True) for length in LENGTHS}
    assert len({tuple(tokens) for tokens in found.values()}) == len(LENGTHS)
    assert len({token for tokens in found.values() for token in tokens}) > len(LENGTHS)
    return found


async def _programs(
    fleet: Fleet, model: str, expected: dict[int, list[int]], block: int, record: Record, family: Family
) -> None:
    for program in ("disaggregated", "balanced"):
        for length in LENGTHS:
            salt = uuid.uuid4().hex
            headers = {**TRACE, "x-tercet-program": program}
            fields: dict[str, Any] = {"model": model, "cache_salt": salt, "ignore_eos": True}
            answer = await complete(fleet.url, prompt_of(length), headers, **fields)
            assert tokens_of(answer) == expected[length], (program, length)
            sent = length if program == "disaggregated" else max(1, round(length * 0.9))
            if sent < MIN_SEND:
                continue
            assert calls_of(answer) == ["prep_recv", "remote_send", "start_generate"]
            started = next(each for each in answer["tercet"]["events"] if each["verb"] == "start_generate")
            assert started["computed"] == length - sent + (program == "disaggregated"), (program, length)
            if any(each["verb"] == "move" for each in answer["tercet"]["events"]):
                continue  # the machine stood still for a while, and another engine took over
            if program != "disaggregated":
                continue
            # What was sent is prefix cache: a longer prompt finds it at the receiver.
            longer = await complete(fleet.url, prompt_of(length) + prompt_of(30, seed=2), headers, **fields)
            found = next(each for each in longer["tercet"]["events"] if each["verb"] == "prep_recv")
            assert found.get("cached", 0) == family.found(length, block), (program, length)
        record.ran(program)


async def _context(fleet: Fleet, model: str, block: int, record: Record, family: Family) -> None:
    """Context that was sent with no request to decode on it is there for whoever comes later."""
    prompt = prompt_of(500, seed=3)
    salt = uuid.uuid4().hex
    source, target = fleet.engine_url("prefill"), fleet.engine_url("decode")
    async with HttpEngine("prefill", source) as sender, HttpEngine("decode", target) as receiver:
        request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt), cache_salt=salt)
        async with receiver.prep_recv(request) as space:
            sent = await sender.remote_send(request, space, space.matched_len)
        layout = space.kv_addr_info.layout
        blocks = [-(-len(prompt) // block) - begin // block for begin in space.kv_addr_info.group_begins]
        layers = [group.num_layers for group in layout.groups]
        wanted = sum(count * planes for count, planes in zip(blocks, layers, strict=True))
        if layout.groups:
            assert sent.bytes == wanted * layout.block_bytes
        all_bytes = -(-len(prompt) // block) * layout.num_layers * layout.block_bytes * layout.tp_size
        record.sent = sent.bytes / all_bytes
        request = Request(
            seq_id=uuid.uuid4().hex, prompt=(*prompt, *prompt_of(40, seed=4)), cache_salt=salt,
            sampling_params={"temperature": 0, "max_tokens": 12, "ignore_eos": True},
        )  # fmt: skip
        outputs = [output async for output in receiver.start_generate(request)]
        first = outputs[0].usage
        assert first is not None
        assert first.cached == family.found(len(prompt), block)
        expected = await complete(source, list(request.prompt), model=model, cache_salt="other", ignore_eos=True)
        assert [token for output in outputs for token in output.token_ids] == tokens_of(expected)
    record.ran("migration of context")


async def _moves(fleet: Fleet, model: str, record: Record) -> None:
    """A running request goes back and forth between the engines."""
    prompt = prompt_of(2 * WINDOW, seed=5)
    headers = {"x-tercet-program": "data_parallel"}
    calm = await complete(fleet.url, prompt, headers, model=model, cache_salt=uuid.uuid4().hex, **LONG)
    async with moving(fleet) as moved:
        answer = await complete(fleet.url, prompt, headers, model=model, cache_salt=uuid.uuid4().hex, **LONG)
    assert answer_of(answer) == answer_of(calm)
    assert len(moved) >= 2
    record.ran("live moves")


async def _failover(fleet: Fleet, model: str, record: Record) -> None:
    """The engine that decodes dies after some tokens, and the other one goes on."""
    prompt = prompt_of(2 * WINDOW, seed=6)
    fields: dict[str, Any] = {"model": model, "max_tokens": 120, "ignore_eos": True}
    calm = await complete(fleet.url, prompt, cache_salt=uuid.uuid4().hex, **fields)
    asked = asyncio.create_task(complete(fleet.url, prompt, TRACE, cache_salt=uuid.uuid4().hex, **fields))
    await until(fleet, lambda running: any(each["engine"] == "decode-0" and each["tokens"] > 5 for each in running))
    send_signal(processes_of(fleet.engine_url("decode")), signal.SIGKILL)
    answer = await asked
    assert answer_of(answer) == answer_of(calm)
    assert answer["tercet"]["events"][-1]["engine"] == "prefill-0"
    record.ran("failover after tokens")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused_at_start(name: str, tmp_path: Path) -> None:
    family, log = FAMILIES[name], tmp_path / "engine.log"
    command = [
        sys.executable, "-m", "tercet.cli", "engine", "--model", str(checkpoint(name)), "--port", str(free_port()),
        "--dtype", "float32", "--", "--max-model-len", "1024", *flags_of(name),
    ]  # fmt: skip
    with noted(name) as record, log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=START_SECONDS, check=False)
        assert done.returncode != 0
        assert family.refusal in log.read_text(), log.read_text()[-3000:]
        record.refused = True
