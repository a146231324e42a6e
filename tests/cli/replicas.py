"""Empty replicas on a storage, made as an owner makes them: no command does that."""

from __future__ import annotations

from uuid import UUID

from waltzd.client import loop
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

NO_KEY = UUID(int=0)


def make_replicas(address: str, *numbers: int, tls: Tls | None = None) -> None:
    """Create empty replicas of these partitions on the storage whose port for operators is at `address`."""

    async def make() -> None:
        async with AdminClient(address, NO_KEY, tls=tls) as stranger:
            key = (await stranger.describe()).cluster_key
        async with AdminClient(address, key, tls=tls) as admin:
            assert await admin.create_partitions(list(numbers)) == dict.fromkeys(numbers)

    loop.run(make())
