"""What a server does for applications, without its network: every call as an awaitable.

The gRPC service and a simulated network stand in front of it. Whoever calls is asked for the cluster key first: a client of
another cluster must not learn more than that it is wrong here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol
from uuid import UUID

from waltzd.errors import BadFrame, ForeignCluster, WaltzError
from waltzd.frame import MountRequest, Topology
from waltzd.port import MountLink
from waltzd.record import Run
from waltzd.server.mounts import Mount, refuse
from waltzd.server.pipeline import Pipeline

REQUEST_SECONDS = 10.0
"""How long a client may take to say what it wants to mount."""


class Owner(Protocol):
    """What this server owns, and what it knows of the others."""

    def topology(self) -> Topology: ...
    async def register(self) -> int:
        """A client id that nobody else ever had or will have."""
        ...

    def pipeline(self, partition: int, generation: int | None) -> Pipeline:
        """Raises `NotOwner`, `NotReady` or `NoSuchPartition` when there is none; None stands for any generation."""
        ...


class Desk:
    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def _check_key(self, key: UUID) -> None:
        ours = self._owner.topology().cluster_key
        if key != ours:
            raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller says {key}", key=ours)

    def locate(self) -> Topology:
        return self._owner.topology()

    async def register(self, key: UUID) -> int:
        self._check_key(key)
        return await self._owner.register()

    def high_water_mark(self, key: UUID, partition: int) -> int:
        self._check_key(key)
        return self._owner.pipeline(partition, None).committed

    async def fetch(self, key: UUID, partition: int, first_id: int, last_id: int | None) -> AsyncGenerator[Run, None]:
        """Committed records; without `last_id`, up to the high-water mark. Close it where it is not read to its end."""
        self._check_key(key)
        async with aclosing(self._owner.pipeline(partition, None).read(first_id, last_id)) as runs:
            async for run in runs:
                yield run

    async def mount(self, link: MountLink) -> None:
        """Serve one mount to its end. Raises what ended it, after the client was told."""
        try:
            request = await self._request(link)
            if request is None:
                return
            self._check_key(request.cluster_key)
            mount = Mount(link, request, self._owner.pipeline(request.partition, request.generation))
            mount.join()
        except WaltzError as error:
            await refuse(link, error)
            raise
        await mount.serve()

    @staticmethod
    async def _request(link: MountLink) -> MountRequest | None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                frames = await link.receive()
        except TimeoutError:
            raise BadFrame(f"a client said nothing for {REQUEST_SECONDS:.0f} seconds") from None
        if frames is None:
            return None
        match frames:
            case [MountRequest() as request]:
                return request
        raise BadFrame("the first frame of a client must be a mount request, and nothing else before its answer")
