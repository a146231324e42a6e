"""What a server does for applications, without its network: every call as an awaitable.

The gRPC service and a simulated network stand in front of it. The cluster key is checked first: a client of another cluster
must not learn more than that it is wrong here.

A client id belongs to the client that registered it. What became of a transaction is found by the client id in the log, so
a client that mounted under another's id could make that one believe what is not so. An id is given out with a token, a
keyed hash of the id and of the identity in the certificate. Every server has the key, so any owner can check a mount, after
any restart, and nothing is kept for each client.

What a caller may do is a question to `access`, at every door: where it is missing, the call is open to the world.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol
from uuid import UUID

from waltzd.errors import BadFrame, ForeignCluster, NotPermitted, WaltzError
from waltzd.format.record import Run
from waltzd.protocol.batches import FeedMode, MountRequest, Registration, Topology
from waltzd.protocol.peers import MountLink
from waltzd.protocol.policy import Rights
from waltzd.server.clients.access import Access, check_append, check_read, check_see, check_subscribe, denied_all
from waltzd.server.clients.mounts import Mount, refuse
from waltzd.server.clients.pipeline import Pipeline

REQUEST_SECONDS = 10.0
"""How long a client may take to say what it wants to mount."""


class Owner(Protocol):
    """What this server owns, and what it knows of the others."""

    def topology(self) -> Topology: ...
    async def register(self) -> int:
        """A client id that no other living client has."""
        ...

    @property
    def client_secret(self) -> bytes:
        """The same on all servers of the cluster, and secret."""
        ...

    def pipeline(self, partition: int, generation: int | None) -> Pipeline:
        """Raises `NotOwner`, `NotReady` or `NoSuchPartition` when there is none; None stands for any generation."""
        ...


class ServerCalls:
    def __init__(self, owner: Owner, access: Access) -> None:
        self._owner = owner
        self._access = access

    def _check_key(self, key: UUID) -> None:
        ours = self._owner.topology().cluster_key
        if key != ours:
            raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller says {key}", key=ours)

    def locate(self, identity: str = "") -> Topology:
        """`identity`, here and below: what the caller's certificate says; empty without one."""
        topology, rights = self._owner.topology(), self._access.rights(identity)
        if rights.sees_everything:
            return topology
        hidden = (
            place if rights.may_see(partition) else replace(place, server=None, address=None, is_hidden=True)
            for partition, place in enumerate(topology.places)
        )
        return replace(topology, places=tuple(hidden))

    async def register(self, key: UUID, identity: str = "") -> Registration:
        self._check_key(key)
        if self._access.rights(identity).is_nothing:
            raise denied_all(identity)
        client = await self._owner.register()
        return Registration(client, token_of(self._owner.client_secret, client, identity))

    def _check_client(self, request: MountRequest, identity: str) -> None:
        if not hmac.compare_digest(request.token, token_of(self._owner.client_secret, request.client, identity)):
            raise NotPermitted(
                f"the client id {request.client} was not given to {identity or 'this caller'}",
                not_done="nothing was mounted",
                next_step="register for a client id, with the certificate that mounts it, and mount with its token",
            )

    async def high_water_mark(self, key: UUID, partition: int, *, confirmed: bool = False, identity: str = "") -> int:
        """`confirmed`: not below any id that was acknowledged to anybody before this call. A name with any right to the
        partition may ask: it is where appends without a view stand."""
        self._check_key(key)
        check_see(self._access.rights(identity), partition)
        pipeline = self._owner.pipeline(partition, None)
        if confirmed:
            await pipeline.confirm()
        return pipeline.committed

    async def find_time(self, key: UUID, partition: int, time: int, *, identity: str = "") -> int:
        """The highest id in front of the first committed transaction whose time is `time` or later."""
        self._check_key(key)
        check_read(self._access.rights(identity), partition)
        return await self._owner.pipeline(partition, None).find_time(time)

    async def fetch(
        self,
        key: UUID,
        partition: int,
        first_id: int,
        last_id: int | None,
        *,
        with_locks: bool = False,
        identity: str = "",
    ) -> AsyncGenerator[Run, None]:
        """Committed records; without `last_id`, up to the high-water mark. Close it where it is not read to its end. The
        right is asked for again with each piece: a log may be read for hours."""
        self._check_key(key)
        check_read(self._access.rights(identity), partition)
        async with aclosing(self._owner.pipeline(partition, None).read(first_id, last_id, with_locks=with_locks)) as runs:
            async for run in runs:
                check_read(self._access.rights(identity), partition)
                yield run

    async def mount(self, link: MountLink) -> None:
        """Serve one mount to its end. Raises what ended it, after the client was told."""
        try:
            request = await self._request(link)
            if request is None:
                return
            self._check_key(request.cluster_key)
            self._check_client(request, link.identity)
            rights = self._access.rights(link.identity)
            _check_rights(rights, request)
            mount = Mount(link, request, self._owner.pipeline(request.partition, request.generation), rights)
            mount.join()
        except WaltzError as error:
            await refuse(link, error)
            raise
        with self._access.reviewing(mount, link.identity):  # nothing was waited for since it was asked for its rights
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


def _check_rights(rights: Rights, request: MountRequest) -> None:
    """What a mount needs from its beginning. One that takes the feed needs the right to append when it appends."""
    if request.feed is FeedMode.NONE or request.asks:
        check_append(rights, request.partition)
    else:
        check_subscribe(rights, request.partition)


def token_of(secret: bytes, client: int, identity: str) -> bytes:
    """The proof that the client id was given to a client of this identity, which knows the token."""
    return hmac.digest(secret, f"client {client} of {identity}".encode(), "sha256")
