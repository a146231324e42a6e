"""Where a console listens."""

from __future__ import annotations

import socket

import pytest

from waltzctl.console.command import bound_socket
from waltzd.errors.operations import PortInUse
from waltzd.protocol.address import Address


def test_the_usual_port_gives_way_and_one_that_was_asked_for_does_not() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with bound_socket(Address("127.0.0.1", taken), may_move=True) as found:
            assert found.getsockname()[1] != taken
        with pytest.raises(PortInUse):
            bound_socket(Address("127.0.0.1", taken), may_move=False)
