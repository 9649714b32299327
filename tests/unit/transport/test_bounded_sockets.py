"""No ZeroMQ socket takes messages of any size."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import zmq

from tercet.transport.sockets import bounded
from tests.sources import modules


def unbounded(text: str) -> Iterator[int]:
    """Lines on which a socket of ZeroMQ is made and not bounded."""
    tree = ast.parse(text)
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bounded"
        for inner in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "socket":
            of_zmq = any(isinstance(each, ast.Attribute) and ast.unparse(each).startswith("zmq.") for each in node.args)
            if of_zmq and id(node) not in inside:
                yield node.lineno


def test_every_socket_is_bounded() -> None:
    files = [path for _, path in modules() if "zmq" in (text := path.read_text()) and ".socket(zmq" in text]
    assert len(files) >= 4
    assert [(path.name, line) for path in files for line in unbounded(path.read_text())] == []
    assert list(unbounded("a = context.socket(zmq.PULL)")) == [1]


@pytest.mark.parametrize(("size", "arrives"), [(1000, True), (1001, False)])
def test_a_message_that_is_too_long_does_not_arrive(size: int, arrives: bool) -> None:
    context = zmq.Context()
    with bounded(context.socket(zmq.PULL), 1000) as takes, context.socket(zmq.PUSH) as sends:
        takes.linger = sends.linger = 0
        sends.connect(f"tcp://127.0.0.1:{takes.bind_to_random_port('tcp://127.0.0.1')}")
        sends.send(b"x" * size)
        sends.send(b"short")
        assert takes.poll(2000 if arrives else 100) == (zmq.POLLIN if arrives else 0) or not arrives
        if takes.poll(0):
            assert (len(takes.recv()) == size) is arrives
    context.term()
