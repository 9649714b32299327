"""Somebody else at an engine's address: nothing is asked of it before it has said who it is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tercet.cluster.ports import free_ports, url_of
from tercet.fleet.membership import ServedModel
from tercet.protocol import EngineUnreachable
from tercet.wire.client import HttpEngine, StreamListener
from tercet_lab.sim.sim_server import ServerConfig, serving

from .models import request_of
from .test_stream_kills import HOST, config_of, up


def with_other_weights(config: ServerConfig) -> ServerConfig:
    model = msgspec.structs.replace(config.profile.model, name="another")
    return msgspec.structs.replace(config, profile=msgspec.structs.replace(config.profile, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("other", [with_other_weights, lambda config: config])
async def test_an_engine_that_was_replaced(streaming: bool, other: Callable[[ServerConfig], ServerConfig]) -> None:
    (port,) = free_ports(HOST, 1)
    config, promises, anew = config_of("e", port), list[ServedModel](), list[str]()
    async with StreamListener() as listener:
        engine = HttpEngine(
            "e",
            url_of(HOST, port),
            listener if streaming else None,
            admit=lambda status: [promise.require_kept(status) for promise in promises],
            on_new=lambda: anew.append("e"),
        )
        async with engine:
            async with serving(config):
                await up(engine.url)
                promises.append(ServedModel.of([await engine.status()]))
                assert [output async for output in engine.start_generate(request_of("s", 100, 3))]
            async with serving(other(config)):
                await up(engine.url)
                second = engine.start_generate(request_of("t", 100, 3))
                if other is with_other_weights:
                    with pytest.raises(EngineUnreachable, match="another"):
                        _ = [output async for output in second]
                    with pytest.raises(EngineUnreachable, match="another"):
                        async with engine.prep_recv(request_of("u", 100, 3)):
                            pytest.fail("it holds blocks for us")
                else:
                    assert [output async for output in second][-1].finished
            assert anew == ["e"]
