"""Memory that comes over a Unix socket: that of the process at its other end, sealed, and only to be read."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, RankTransport, SendReport, TransportSettings, sockets
from tercet.transport.backends.reading import HostBackend
from tercet.transport.region import TAIL_BYTES
from tercet.transport.sockets import UNIX, connect_unix, is_address
from tests.unit.transport.ranks import (
    FINGERPRINT,
    SECONDS,
    TOKENS,
    Held,
    Send,
    content,
    filled,
    grant,
    outcome_between,
    rank,
    settle,
    whole,
)

KIB = 1024
LAYERS, BLOCKS, BYTES = 2, 8, 4 * KIB
ALL = tuple(range(BLOCKS))
AUTO, HOST = TransportSettings("auto"), TransportSettings("host")


def region(seed: int = 1) -> KVRegion:
    return filled(LAYERS, BLOCKS, BYTES, seed)


def unix_of(transport: RankTransport) -> str:
    (found,) = [address for address in transport.addresses if address.startswith(UNIX)]
    return found


@contextmanager
def offering(source: KVRegion, memory: int, settings: TransportSettings = AUTO) -> Generator[RankTransport]:
    """A sender that passes some other descriptor as its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostBackend, "__init__", lambda self, _region: setattr(self, "memory", os.dup(memory)))
        transport = RankTransport(source, FINGERPRINT, settings)
    try:
        yield transport
    finally:
        transport.close()
        source.close()


def sent_with(memory: int, source: KVRegion, theirs: KVRegion) -> str:
    """What KV goes over from a sender with such memory; it must arrive."""
    with rank(theirs, AUTO) as ours, offering(source, memory) as sender:
        lease = grant(ours, ALL)
        send = Send(sender, ours.addresses, lease, whole(source))
        send.push(range(LAYERS), ALL)
        send.finish(BLOCKS * TOKENS)
        outcome = send.wait()
        assert isinstance(outcome, SendReport), outcome
        assert ours.grants.revoke(lease) == BLOCKS * TOKENS
        assert content(theirs) == content(source)
        return outcome.transport


def unsealed(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def test_memory_of_the_sender_is_read() -> None:
    source = region()
    assert sent_with(source.fd, source, region(2)) == "host"


def test_a_file_that_could_shrink_is_left_for_tcp() -> None:
    source = region()
    fd = unsealed(source.shape.size)
    try:
        assert sent_with(fd, source, region(2)) == "tcp"
    finally:
        os.close(fd)


@pytest.mark.parametrize("blocks", [BLOCKS - 4, BLOCKS, BLOCKS + 4])
def test_a_sealed_file_that_is_not_the_senders_region_is_left_for_tcp(blocks: int) -> None:
    other = filled(LAYERS, blocks, BYTES, 3)
    assert other.shape.size > TAIL_BYTES
    assert sent_with(other.fd, region(), region(2)) == "tcp"
    other.close()


def test_what_is_no_memory_file_is_left_for_tcp() -> None:
    ends = os.pipe()
    with open(__file__, "rb") as file:
        for fd in (ends[0], file.fileno()):
            assert sent_with(fd, region(), region(2)) == "tcp"
    for end in ends:
        os.close(end)


def test_where_only_host_is_allowed_the_reason_is_told() -> None:
    theirs, other = region(2), region(3)
    before = content(theirs)
    with rank(theirs, HOST) as ours, offering(region(), other.fd, HOST) as sender:
        outcome = Send(sender, ours.addresses, grant(ours, ALL), whole(other)).wait()
        assert isinstance(outcome, TransferFailed)
        assert "does not read the sender's memory correctly" in outcome.message
        assert content(theirs) == before
    other.close()


def test_what_receivers_are_given_can_only_be_read() -> None:
    source = region()
    backend = HostBackend(source)
    assert backend.memory is not None
    assert fcntl.fcntl(backend.memory, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    backend.close()
    backend.close()
    source.close()


def test_descriptors_are_given_back_with_the_session() -> None:
    ours, theirs = region(), region(2)
    before = Held(ours, theirs)
    with rank(ours, AUTO) as sender, rank(theirs, AUTO) as receiving:
        assert isinstance(outcome_between(sender, ours, receiving), SendReport)
    before.require_back()


def test_a_stranger_that_passes_descriptors_leaves_none_behind() -> None:
    theirs = region(2)
    with rank(theirs, AUTO) as ours:
        before = Held()
        for _ in range(3):
            with connect_unix(unix_of(ours), SECONDS) as stranger, suppress(OSError):
                for _ in range(5):
                    socket.send_fds(stranger, [b"x"], [theirs.fd] * 3)
        settle(lambda: ours.counters()["connections"] == 0)
        before.require_back()


# ---- who connects to whom --------------------------------------------------------------------------------------------


def test_a_receiver_of_another_machine_is_read_over_tcp() -> None:
    """Its Unix socket is not to be found from here."""
    ours, theirs = region(), region(2)
    with rank(ours, AUTO) as sender, rank(theirs, AUTO) as receiving:
        tcp = [address for address in receiving.addresses if not address.startswith(UNIX)]
        elsewhere = f"{UNIX}tercet-kv-{'0' * 32}"
        lease = grant(receiving, ALL)
        send = Send(sender, (*tcp, elsewhere), lease, whole(ours))
        send.push(range(LAYERS), ALL)
        send.finish(BLOCKS * TOKENS)
        outcome = send.wait()
        assert isinstance(outcome, SendReport)
        assert outcome.transport == "tcp"


@pytest.mark.parametrize("there", [True, False])
def test_a_sender_that_insists_on_host_says_why_not(there: bool) -> None:
    ours, theirs = region(), region(2)
    with rank(ours, HOST) as sender, rank(theirs, TransportSettings("tcp")) as receiving:
        more = [f"{UNIX}tercet-kv-{'0' * 32}"] if there else []
        outcome = Send(sender, (*receiving.addresses, *more), grant(receiving, ALL), whole(ours)).wait()
        assert isinstance(outcome, TransferFailed)
        assert "host: the receiver's Unix socket cannot be reached from here" in outcome.message
        assert ("Connection refused" if there else "the receiver has no Unix socket") in outcome.message


def test_another_users_process_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = region(2)
    with rank(theirs, AUTO) as ours:
        monkeypatch.setattr(sockets.os, "geteuid", lambda: 12345)
        with pytest.raises(PermissionError, match="but this process to user 12345"):
            connect_unix(unix_of(ours), SECONDS)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(SECONDS)
            stranger.connect("\0" + unix_of(ours).removeprefix(UNIX))
            assert stranger.recv(1) == b""


def test_a_receiver_of_another_user_is_read_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_sock: socket.socket) -> None:
        raise PermissionError("somebody else's")

    ours, theirs = region(), region(2)
    with rank(ours, AUTO) as sender, rank(theirs, AUTO) as receiving:
        monkeypatch.setattr(sockets, "require_own_user", refuse)
        outcome = outcome_between(sender, ours, receiving)
        assert isinstance(outcome, SendReport)
        assert outcome.transport == "tcp"


OTHER_USER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect("\\0" + sys.argv[1])
    print(len(stranger.recv(1)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_closed_at_once() -> None:
    with rank(region(2), AUTO) as ours:
        command = [sys.executable, "-c", OTHER_USER, unix_of(ours).removeprefix(UNIX)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        assert found.stdout == "0\n"


# ---- namespaces ------------------------------------------------------------------------------------------------------

IN_A_NAMESPACE = f"""
import sys
from tests.unit.transport.ranks import Send, filled, rank, whole
from tercet.transport import TransportSettings

lease, *addresses = sys.argv[1:]
ours = filled({LAYERS}, {BLOCKS}, {BYTES}, 1)
with rank(ours, TransportSettings("auto")) as sender:
    send = Send(sender, addresses, lease, whole(ours))
    send.push(range({LAYERS}), range({BLOCKS}))
    send.finish({BLOCKS * TOKENS})
    print(send.wait().transport)
"""


def can_unshare(*flags: str) -> bool:
    try:
        return subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def from_a_namespace(*flags: str) -> str:
    """What KV goes over from a sender in namespaces of its own, whose bytes must arrive."""
    theirs, expected = region(2), region()
    with rank(theirs, AUTO) as ours:
        lease = grant(ours, ALL)
        command = ["unshare", *flags, sys.executable, "-c", IN_A_NAMESPACE, lease, *ours.addresses]
        found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if found.returncode == 0:
            assert content(theirs) == content(expected)
    expected.close()
    return found.stdout.strip() or found.stderr[-300:]


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare("-pf"), reason="this machine does not let us make a PID namespace")
def test_a_sender_in_another_pid_namespace_is_mapped() -> None:
    """As in two containers of one pod, which do not see each other's processes."""
    assert from_a_namespace("-pf", "--mount-proc") == "host"


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare("-n"), reason="this machine does not let us make a network namespace")
def test_a_sender_in_another_network_namespace_does_not_find_the_unix_socket() -> None:
    assert "host" not in from_a_namespace("-n").splitlines()


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("tcp://127.0.0.1:80", True),
        ("tcp://[::1]:80", True),
        (f"{UNIX}tercet-kv-{'ab' * 16}", True),
        (f"{UNIX}tercet-kv-{'ab' * 15}", False),
        (f"{UNIX}another", False),
        ("unix:/tmp/x", False),
        ("tcp://127.0.0.1:65536", False),
        ("tcp:// 127.0.0.1:80", False),
        ("", False),
    ],
)
def test_addresses_that_a_rank_can_have(text: str, valid: bool) -> None:
    assert is_address(text) == valid
