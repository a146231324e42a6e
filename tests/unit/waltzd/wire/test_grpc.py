"""A caller that got no answer says whom it asked, where, and for how long it waited."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from uuid import UUID

import pytest

from waltzd.errors import CannotConnect
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.storages import AdminClient

KEY = UUID(int=7)
SECONDS = 0.05


@pytest.mark.parametrize(
    ("make", "who"),
    [
        (lambda address: AdminClient(address, KEY, seconds=SECONDS, name="s1"), "the storage s1"),
        (lambda address: AdminClient(address, KEY, seconds=SECONDS), "the storage"),
        (lambda address: ServerAdminClient(address, KEY, seconds=SECONDS), "the server"),
    ],
)
def test_a_deadline_names_who_and_where_and_how_long(
    make: Callable[[str], AdminClient | ServerAdminClient], who: str
) -> None:
    """As with a process that was stopped, the kernel takes the connection, and nobody says anything."""

    async def ask(address: str) -> None:
        async with make(address) as client:
            await client.describe()

    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(CannotConnect) as caught:
            asyncio.run(ask(address))
    assert caught.value.message == f"{who} at {address} did not answer within 0.05 seconds"
