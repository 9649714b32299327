"""A picker with TLS: what it shows changes with its files, while it serves."""

# pyright: reportAttributeAccessIssue=false
# Modules made from .proto files have no types.

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from tercet.protocol import BadRequest
from tercet_gateway.protos import HealthCheckRequest, HealthStub
from tests.unit.wire.client.certificates import Authority

from .pickers import serving


async def is_trusted(port: int, by: Authority) -> bool:
    """Whether a client that trusts only this authority is served."""
    credentials = grpc.ssl_channel_credentials(by.file.read_bytes())
    # Or channels of one address would share a connection that is open already.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        try:
            await HealthStub(channel).Check(HealthCheckRequest(service="liveness"), timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    certificate, key = first.issue("picker")
    new_certificate, new_key = second.issue("renewed")
    async with serving("both", tls_cert=str(certificate), tls_key=str(key)) as served:
        port = served.server.port
        assert await is_trusted(port, first)
        assert not await is_trusted(port, second)
        # Half of the pair is no pair: what was good last is shown, and the log says so once.
        certificate.write_bytes(new_certificate.read_bytes())
        assert await is_trusted(port, first)
        assert await is_trusted(port, first)
        assert caplog.text.count("cannot be used, the previous one stays in use") == 1
        key.write_bytes(new_key.read_bytes())
        assert await is_trusted(port, second)
        assert not await is_trusted(port, first)
        certificate.unlink()
        assert await is_trusted(port, second)


@pytest.mark.parametrize("broken", ["", "no certificate"])
async def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path, broken: str) -> None:
    certificate, key = Authority(tmp_path, "ca").issue("picker")
    certificate.write_text(broken)
    with pytest.raises(BadRequest) as refused:
        async with serving("both", tls_cert=str(certificate), tls_key=str(key)):
            pass
    assert refused.value.param == "tls-cert"
