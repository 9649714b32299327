"""Who we are for the API server: a pod's service account, whose token and CA change, or a kubeconfig file."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from tercet.fleet.kubernetes_api import from_kubeconfig, in_cluster
from tercet.protocol import BadRequest
from tests.unit.wire.client.certificates import Authority

from .api_server import api_server, pod
from .test_watching import watching

INSIDE = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("models\n")
    Authority(tmp_path, "ca").file.rename(tmp_path / "ca.crt")
    return tmp_path


def test_a_pods_account_is_read_anew_as_it_rotates(account: Path) -> None:
    access = in_cluster(account, INSIDE)
    assert (access.url, access.namespace, access.token()) == ("https://10.96.0.1:443", "models", "first")
    (account / "token").write_text("second\n")
    assert access.token() == "second"
    before = access.tls()
    assert before is access.tls()
    Authority(account, "another").file.rename(account / "ca.crt")
    after = access.tls()
    assert after is not before
    assert after is not None
    assert after.verify_mode is ssl.CERT_REQUIRED
    six = in_cluster(account, {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert six.url == "https://[fd00::1]:443"


async def test_only_a_server_that_the_ca_has_signed_gets_the_token(account: Path) -> None:
    signer = Authority(account, "signer")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*signer.issue("server"))
    async with api_server(tls) as server:
        server.put(pod("a"))
        port = server.url.rpartition(":")[2]
        access = in_cluster(account, {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port})
        async with watching(server, api=access) as seen:
            await asyncio.sleep(0.05)
            assert (seen.pods, server.tokens) == (None, []), "another CA is trusted so far"
            signer.file.rename(account / "ca.crt")
            await seen.until(lambda pods: set(pods) == {"a"})
            assert set(server.tokens) == {"Bearer first"}


def test_outside_of_a_pod(account: Path) -> None:
    for directory, environment in ((account, {}), (account / "nowhere", INSIDE)):
        with pytest.raises(BadRequest, match="set kubeconfig to a kubeconfig file"):
            in_cluster(directory, environment)


def kubeconfig(file: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    content = {
        "current-context": "here",
        "contexts": [
            {"name": "there", "context": {"cluster": "x", "user": "y"}},
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "models"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file")
    data = base64.b64encode(Authority(tmp_path, "ca").file.read_bytes()).decode()
    file = tmp_path / "config"
    plain = from_kubeconfig(kubeconfig(file, {"server": "http://127.0.0.1:8001/"}, {"token": "t"}))
    assert (plain.url, plain.namespace, plain.token(), plain.tls()) == ("http://127.0.0.1:8001", "models", "t", None)
    for cluster in ({"certificate-authority-data": data}, {"certificate-authority": "ca.pem"}):
        cluster["server"] = "https://127.0.0.1:6443"
        found = from_kubeconfig(kubeconfig(file, cluster, {"tokenFile": "token"}))
        assert found.token() == "from-file"
        context = found.tls()
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1
    loose = {"server": "https://127.0.0.1:6443", "insecure-skip-tls-verify": True}
    context = from_kubeconfig(kubeconfig(file, loose, {})).tls()
    assert context is not None
    assert context.verify_mode is ssl.CERT_NONE


def test_a_user_without_credentials(tmp_path: Path) -> None:
    text = (
        "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: %s}]\n"
    )
    (tmp_path / "config").write_text(text % "")
    assert from_kubeconfig(tmp_path / "config").token() == ""
    (tmp_path / "config").write_text(text % "[token]")
    with pytest.raises(BadRequest, match="kubeconfig"):
        from_kubeconfig(tmp_path / "config")


def test_a_client_certificate(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "ca").issue("me")
    pair = {"client-certificate": str(certificate), "client-key": str(key)}
    cluster = {"server": "https://127.0.0.1:6443"}
    assert from_kubeconfig(kubeconfig(tmp_path / "config", cluster, pair)).tls() is not None
    pair["client-key"] = str(certificate)
    with pytest.raises(BadRequest, match="certificates cannot be used"):
        from_kubeconfig(kubeconfig(tmp_path / "config", cluster, pair))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("current-context: nowhere\ncontexts: []\n", "no current context"),
        ("just text", "no current context"),
        ("{", "no current context"),
        ("", "no current context"),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
            "clusters: [{name: c, cluster: {server: 'https://x'}}]\nusers: [{name: u, user: {exec: {}}}]\n",
            "kubectl proxy",
        ),
    ],
)
def test_kubeconfigs_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(BadRequest, match=said):
        from_kubeconfig(tmp_path / "config")
    with pytest.raises(BadRequest, match="cannot be read"):
        from_kubeconfig(tmp_path / "nowhere")
