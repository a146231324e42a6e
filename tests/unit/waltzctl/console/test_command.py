"""Where a console listens."""

from __future__ import annotations

import socket

import pytest

from waltzctl.console.command import Serving, bound_socket
from waltzd.errors import PortInUse
from waltzd.protocol.address import Address


def serving(port: int, *, may_move: bool) -> Serving:
    return Serving(
        place=Address("127.0.0.1", port),
        may_move=may_move,
        every=2.0,
        output="table",
        allows_changes=False,
        names=(),
        files=None,
        until_eof=False,
    )


def test_the_usual_port_gives_way_and_one_that_was_asked_for_does_not() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with bound_socket(serving(taken, may_move=True)) as found:
            assert found.getsockname()[1] != taken
        with pytest.raises(PortInUse):
            bound_socket(serving(taken, may_move=False))
