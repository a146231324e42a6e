"""What a server does for applications, without its network: each call as an awaitable.

The gRPC service and a simulated network stand before it. The cluster key is checked first: a client of another cluster
must learn only that it is wrong here.

A client id belongs to the client that registered it. The log is searched by client id for the outcome of a transaction,
so a client that mounted under another client's id could falsify that outcome. Therefore an id is given out with a token,
a keyed hash of the id and of the identity in the certificate. All servers share the key, so any owner can check a mount
after any restart, and nothing is stored for each client.

There are 2^31 - 1 client ids, and they start over after some years: each time is a lap. The hash includes the lap, so an
owner tells the tokens of two laps apart, and refuses the older holder long before its id is given out again.

Every call asks `authorizer` what its caller may do: a call that does not ask is open to the world.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import replace
from typing import Protocol
from uuid import UUID

from waltzd.cluster.cluster import CLIENT_ID_MAX, CLIENT_NUMBERS_KEPT, client_of, lap_of, number_of
from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import BadArgument, ForeignCluster, NoGroupLog, NotPermitted, Superseded, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.key_index import LockQuery
from waltzd.format.record import Run
from waltzd.protocol.address import is_name
from waltzd.protocol.batches import INTRODUCTION, FeedMode, Introduction, MountRequest, Registration, Topology
from waltzd.protocol.groups import Change, Changed, Dismissed, GroupStatus, JoinRequest, ParkedTransaction
from waltzd.protocol.level import THIS
from waltzd.protocol.locks import (
    HISTORY_IDS_MAX,
    MARKED_LOCKS_MAX,
    MARKED_MAX,
    History,
    HistoryPart,
    MarkedPage,
    MarkedQuery,
)
from waltzd.protocol.peers import AttendLink, MountLink
from waltzd.protocol.policy import NO_QUOTAS, Rights
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.role import Role
from waltzd.server.clients.authorizer import (
    Authorizer,
    Reviewed,
    check_append,
    check_attend,
    check_group,
    check_read,
    check_see,
    check_subscribe,
    denied_all,
    denied_group,
    role_of,
)
from waltzd.server.clients.mounts import REFUSED_SECONDS, TEXT_MAX, Mount, check_request, refuse
from waltzd.server.clients.pipeline import MARKED_BYTES_MAX, Pipeline
from waltzd.server.clients.registry import REQUEST_COST, ClientRegistry, Principal, QuotaUsage, principal_of

ID_BYTES = 9
"""Largest size of an id in an answer."""
PLACE_COST = 32
"""Approximate bytes of an answer for each partition."""
MEND_READER = (
    "read again from the fork after undoing what came from the transactions above it; `client.end_position` gives a "
    "position of the current timeline"
)
"""Next step for a reader whose position is of another timeline."""
REQUEST_SECONDS = 10.0
"""Time that a client has for its request to mount."""


class Owner(Protocol):
    """Partitions of this server, and its knowledge of other servers."""

    def topology(self) -> Topology: ...
    async def register(self) -> int:
        """Return a client number that was never given out."""
        ...

    async def raise_epoch(self, name: str) -> int:
        """Return a new epoch for the instance that is to be the only one of its name, above all older epochs."""
        ...

    async def newest_epoch(self, name: str) -> int:
        """Return the highest epoch of a name that was given out before this call; 0 for none."""
        ...

    @property
    def client_secret(self) -> bytes:
        """Secret of the tokens, shared by all servers of the cluster."""
        ...

    @property
    def newest_client(self) -> int:
        """Highest client number that this server knows of."""
        ...

    def pipeline(self, partition: int, generation: int | None) -> Pipeline:
        """Return the pipeline of a partition; None stands for any generation. Raise `NotOwner`, `NotReady` or
        `NoSuchPartition` if there is none."""
        ...


class Attending(Reviewed, Protocol):
    """A member of a consumer group that has joined."""

    async def serve(self) -> None:
        """Serve the member to its end. Raise the error that ended it, after the member was sent it."""
        ...


class Groups(Protocol):
    """Consumer groups of this server."""

    async def make(self, meta: GroupMeta) -> MadeGroup: ...
    async def find(self, name: str) -> MadeGroup: ...
    def partitions_of(self, meta: GroupMeta) -> int:
        """Return the partitions of a group, as bits of one number."""
        ...

    async def level(self) -> None:
        """Read the group log to its end."""
        ...

    async def status(self, name: str, partition: int) -> GroupStatus: ...
    def parked(
        self, name: str, partition: int | None, after: int | None, count: int
    ) -> tuple[tuple[ParkedTransaction, ...], bool]: ...
    async def change(
        self, name: str, made_at: int | None, partition: int, change: Change, ids: Sequence[int]
    ) -> Changed: ...
    async def join(self, link: AttendLink, request: JoinRequest, admit: Callable[[], QuotaUsage]) -> Attending:
        """Join a member. `admit` is called when nothing more is awaited, and raises if the member is refused."""
        ...


class NoGroups:
    """Consumer groups of a server that was made without any."""

    async def make(self, meta: GroupMeta) -> MadeGroup:
        raise NoGroupLog("this server keeps no groups")

    async def find(self, name: str) -> MadeGroup:
        raise NoGroupLog("this server keeps no groups")

    def partitions_of(self, meta: GroupMeta) -> int:
        return 0

    async def level(self) -> None:
        raise NoGroupLog("this server keeps no groups")

    async def status(self, name: str, partition: int) -> GroupStatus:
        raise NoGroupLog("this server keeps no groups")

    def parked(
        self, name: str, partition: int | None, after: int | None, count: int
    ) -> tuple[tuple[ParkedTransaction, ...], bool]:
        raise NoGroupLog("this server keeps no groups")

    async def change(self, name: str, made_at: int | None, partition: int, change: Change, ids: Sequence[int]) -> Changed:
        raise NoGroupLog("this server keeps no groups")

    async def join(self, link: AttendLink, request: JoinRequest, admit: Callable[[], QuotaUsage]) -> Attending:
        raise NoGroupLog("this server keeps no groups")


class ServerCalls:
    def __init__(
        self, owner: Owner, authorizer: Authorizer, registry: ClientRegistry, groups: Groups | None = None
    ) -> None:
        self._owner = owner
        self._authorizer = authorizer
        self._registry = registry
        self._groups: Groups = groups or NoGroups()

    def _check_key(self, key: UUID) -> None:
        ours = self._owner.topology().cluster_key
        if key != ours:
            raise ForeignCluster(f"this server belongs to the cluster {ours}; the caller named cluster {key}", key=ours)

    def _rights(self, identity: str, partition: int) -> Rights:
        return self._authorizer.rights_in(identity, partition, group_log=self._owner.topology().group_log)

    async def _pay(self, identity: str, rights: Rights, size: int = REQUEST_COST) -> None:
        """Charge a call to the quota of its name."""
        if rights.quotas is not NO_QUOTAS:
            await self._registry.usage_of(principal_of(identity), rights.quotas).pay(size)

    async def located(self, identity: str = "") -> Topology:
        """Return what `locate` returns, and charge the caller for its size."""
        found = self.locate(identity)
        await self._pay(identity, self._authorizer.rights(identity), REQUEST_COST + PLACE_COST * len(found.places))
        return found

    def locate(self, identity: str = "") -> Topology:
        """Return the owners of the partitions. `identity`, here and below: the URI in the caller's certificate; empty
        without one."""
        rights = self._authorizer.rights(identity)
        topology = replace(self._owner.topology(), channels=self._authorizer.channels(rights))
        if role_of(identity) is Role.CLIENT:
            topology = replace(topology, groups=None)
        if rights.sees_everything:
            return topology
        hidden = (
            place if rights.may_see(partition) else replace(place, server=None, address=None, is_hidden=True)
            for partition, place in enumerate(topology.places)
        )
        return replace(topology, places=tuple(hidden))

    async def register(self, key: UUID, identity: str = "", introduction: Introduction = INTRODUCTION) -> Registration:
        self._check_key(key)
        THIS.check_client(introduction.version)
        rights = self._authorizer.rights(identity)
        if rights.is_nothing:
            raise denied_all(identity)
        usage = self._registry.usage_of(principal_of(identity), rights.quotas)
        await usage.pay(REQUEST_COST)
        await usage.take_id()
        number, epoch = await self._owner.register(), 0
        if introduction.is_exclusive or rights.one_instance:
            epoch = await self._epoch(principal_of(identity), identity, introduction)
        client = client_of(number)
        return Registration(client, self._token(client, number, identity, epoch), epoch)

    async def _epoch(self, principal: Principal, identity: str, introduction: Introduction) -> int:
        """Return a new epoch, or the caller's own if it has one and only needs another client id."""
        if principal.role is not Role.CLIENT:
            raise NotPermitted(f"{principal.name} has the role {principal.role}; only applications have a newest instance")
        before = introduction.before
        if before is None or before.epoch == 0:
            return await self._owner.raise_epoch(principal.name)
        self._proven(before.client, before.token, identity, before.epoch)
        newest = await self._owner.newest_epoch(principal.name)
        if newest > before.epoch:
            raise Superseded(f"a newer instance of {principal.name} was registered, with epoch {newest}", epoch=newest)
        return before.epoch

    def _token(self, client: int, number: int, identity: str, epoch: int) -> bytes:
        return token_of(self._owner.client_secret, client, identity, epoch, lap=lap_of(number))

    def _proven(self, client: int, token: bytes, identity: str, epoch: int) -> int:
        """Return the client number that the token proves; raise `NotPermitted` if it proves none."""
        number = number_of(client, self._owner.newest_client)
        if hmac.compare_digest(token, self._token(client, number, identity, epoch)):
            return number
        older = number - CLIENT_ID_MAX
        if older > 0 and hmac.compare_digest(token, self._token(client, older, identity, epoch)):
            return older
        raise NotPermitted(
            f"the client id {client} was not given to {identity or 'this caller'}",
            not_done="nothing was mounted",
            next_step="register for a client id, with the certificate that mounts it, and mount with its token",
        )

    def _check_age(self, number: int) -> None:
        """Raise `NotPermitted` if the id of this number is given out again soon, or was."""
        age = self._owner.newest_client - number
        if age > CLIENT_NUMBERS_KEPT:
            raise NotPermitted(
                f"the client id {client_of(number)} was given out {age} client ids ago; it is good for "
                f"{CLIENT_NUMBERS_KEPT}, because all {CLIENT_ID_MAX} are given out again",
                not_done="nothing was mounted",
                next_step="start the client again; it gets another client id",
            )

    async def _displace_older(self, pipeline: Pipeline, request: MountRequest, identity: str) -> None:
        """If only the newest instance of a name may live, accept this one, and refuse all appends of older instances from
        now on.

        The order is the proof. The coordinator is asked after the log here is open, so every instance that an earlier
        owner admitted is known. After the epoch is recorded here, a majority of the storages confirms that no server has
        replaced this owner: a successor opens later, and asks the coordinator later. So from now on no owner accepts an
        append of an older instance. What was accepted before has an id up to the barrier of this mount, or never gets
        one."""
        name, one_instance = principal_of(identity).name, self._rights(identity, request.partition).one_instance
        if request.epoch == 0:
            if one_instance:
                raise Superseded(
                    f"only the newest instance of {name} may live, by its grant; this one was registered before that",
                    next_step="start this instance again",
                )
            return
        if not pipeline.knows_epoch(name):
            pipeline.displace_older(name, await self._owner.newest_epoch(name), all_of_them=one_instance)
        pipeline.check_epoch(name, request.epoch)
        pipeline.displace_older(name, request.epoch, all_of_them=one_instance)
        await pipeline.confirm()

    async def high_water_mark(
        self,
        key: UUID,
        partition: int,
        *,
        confirmed: bool = False,
        since: Position | None = None,
        identity: str = "",
    ) -> Position:
        """Return the high-water mark. `confirmed`: it is not below any id that was acknowledged before this
        call. A name with any right to the partition may ask, because appends without a view begin there. Raise
        `OtherTimeline` if `since`, up to which the caller has read, is not on this log."""
        self._check_key(key)
        rights = self._rights(identity, partition)
        check_see(rights, partition)
        await self._pay(identity, rights)
        pipeline = self._owner.pipeline(partition, None)
        if confirmed:
            await pipeline.confirm()
        lineage = pipeline.session.lineage
        if since is not None:
            lineage.check(since.timeline, since, what="the reader", partition=partition, next_step=MEND_READER)
        return Position(pipeline.committed, lineage.current)

    async def find_time(self, key: UUID, partition: int, time: int, *, identity: str = "") -> Position:
        """Return the highest id before the first committed transaction at or after `time`."""
        self._check_key(key)
        rights = self._rights(identity, partition)
        check_read(rights, partition)
        await self._pay(identity, rights)
        pipeline = self._owner.pipeline(partition, None)
        return Position(await pipeline.find_time(time), pipeline.session.lineage.current)

    async def history(
        self,
        key: UUID,
        partition: int,
        query: LockQuery,
        *,
        confirmed: bool = False,
        identity: str = "",
        sent: ExitStack | None = None,
    ) -> HistoryPart:
        """Return committed transactions that marked a lock: an answer to the start of the query, for at least one id.
        `confirmed`: see `high_water_mark`. `sent`: see `fetch_marked`."""
        self._check_key(key)
        rights = self._rights(identity, partition)
        check_read(rights, partition)
        if not 0 < query.limit <= HISTORY_IDS_MAX or query.first_id < 0:
            raise BadArgument(
                f"a history lists 1 to {HISTORY_IDS_MAX} ids from id 0 on, not {query.limit} from id {query.first_id}"
            )
        usage = self._registry.usage_of(principal_of(identity), rights.quotas)
        await usage.pay(REQUEST_COST)
        pipeline = self._owner.pipeline(partition, None)
        await _hold(pipeline, usage, ID_BYTES * query.limit, sent)
        if confirmed:
            await pipeline.confirm()
        timeline = pipeline.session.lineage.current
        found, end = await pipeline.find_marks(replace(query, limit=query.limit + 1), usage=usage)
        check_read(self._rights(identity, partition), partition)
        ids, has_more = found.ids[: query.limit], len(found.ids) > query.limit
        history = History(partition=partition, ids=ids, end=Position(end, timeline), has_more=has_more)
        last_id = query.first_id if query.newest_first else end
        is_whole = has_more or found.through == last_id or end < query.first_id
        return HistoryPart(history=history, through=None if is_whole else found.through)

    async def fetch_marked(
        self,
        key: UUID,
        partition: int,
        query: MarkedQuery,
        *,
        confirmed: bool = False,
        reach: int = EMPTY,
        since: Position | None = None,
        identity: str = "",
        sent: ExitStack | None = None,
    ) -> MarkedPage:
        """Return committed transactions that marked all locks of one of several groups, with their records: an answer to
        the start of the query. `confirmed`, `since`: see `high_water_mark`. `reach`: an id to wait for a moment until it is
        committed. `sent`: is closed when the answer has been sent."""
        self._check_key(key)
        rights = self._rights(identity, partition)
        check_read(rights, partition)
        locks = sum(map(len, query.groups))
        if not 0 < query.limit <= MARKED_MAX or query.first_id < 0:
            raise BadArgument(
                f"an answer has 1 to {MARKED_MAX} transactions from id 0 on, not {query.limit} from id {query.first_id}"
            )
        if not 0 < locks <= MARKED_LOCKS_MAX or not all(query.groups):
            raise BadArgument(
                f"a question has 1 to {MARKED_LOCKS_MAX} locks in groups of at least one lock, not {locks} in "
                f"{len(query.groups)} groups"
            )
        usage = self._registry.usage_of(principal_of(identity), rights.quotas)
        await usage.pay(REQUEST_COST)
        pipeline = self._owner.pipeline(partition, None)
        await pipeline.reach(reach)
        if confirmed:
            await pipeline.confirm()
        if since is not None:
            lineage = pipeline.session.lineage
            lineage.check(since.timeline, since, what="the reader", partition=partition, next_step=MEND_READER)
        with ExitStack() as held:
            page = await pipeline.find_marked(query, usage=usage, held=held)
            usage.fed(sum(map(len, page.records)))  # the next call waits until it is paid: this answer takes memory
            check_read(self._rights(identity, partition), partition)
            if sent is not None:
                sent.callback(held.pop_all().close)
        return page

    async def fetch(
        self,
        key: UUID,
        partition: int,
        first_id: int,
        last_id: int | None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
        identity: str = "",
    ) -> AsyncGenerator[Run, None]:
        """Yield committed records; without `last_id`, up to the high-water mark. Close it if it is not read to its end.
        The right is checked again with each piece, because a log may be read for hours. Raise `OtherTimeline` if the ids
        of `timeline` up to `last_id` are not those of this log."""
        self._check_key(key)
        rights = self._rights(identity, partition)
        check_read(rights, partition)
        pipeline = self._owner.pipeline(partition, None)
        usage = self._registry.usage_of(principal_of(identity), rights.quotas)
        await usage.pay(REQUEST_COST)
        if timeline is not None:
            last = first_id if last_id is None else last_id
            lineage = pipeline.session.lineage
            lineage.check(timeline, last, what="the reader", partition=partition, next_step=MEND_READER)
        async with aclosing(pipeline.read(first_id, last_id, with_locks=with_locks, usage=usage)) as runs:
            async for run in runs:
                await usage.pay(len(run.data))
                check_read(self._rights(identity, partition), partition)
                yield run

    async def mount(self, link: MountLink) -> None:
        """Serve one mount to its end. Raise the error that ended it, after the client was sent it."""
        try:
            request = await self._request(link)
            if request is None:
                return
            self._check_key(request.cluster_key)
            check_request(request)
            number = self._proven(request.client, request.token, link.identity, request.epoch)
            self._check_age(number)
            # first: errors of owners say where they are
            _check_rights(self._rights(link.identity, request.partition), request)
            pipeline = self._owner.pipeline(request.partition, request.generation)
            await self._displace_older(pipeline, request, link.identity)
            principal, rights = principal_of(link.identity), self._rights(link.identity, request.partition)
            _check_rights(rights, request)
            usage = self._registry.usage_of(principal, rights.quotas)
            mount = Mount(link, request, pipeline, rights, usage, lap=lap_of(number))
            mount.join()
        except WaltzError as error:
            await refuse(link, error)
            raise
        # No await since the rights were looked up, so no policy can have changed between.
        is_hidden = request.partition == self._owner.topology().group_log
        reviewing = nullcontext() if is_hidden else self._authorizer.reviewing(mount, link.identity)
        with reviewing, self._registry.connect(principal, request, link) as connected:
            await mount.serve(connected)

    # -- consumer groups

    def check_group(self, key: UUID, name: str, identity: str = "") -> None:
        """Raise if a caller may do nothing in a group of this name, before anything else of a request is examined."""
        self._check_key(key)
        check_group(self._authorizer.rights(identity), name)

    async def make_group(self, key: UUID, meta: GroupMeta, identity: str = "") -> MadeGroup:
        """Create a group on the disks of a majority. A group that exists with the same settings is left as it is."""
        self.check_group(key, meta.name, identity)
        rights = self._authorizer.rights(identity)
        denied = rights.first_unattended(meta.name, self._groups.partitions_of(meta))
        if denied is not None:
            raise denied_group(rights, denied, meta.name)
        await self._pay(identity, rights)
        return await self._groups.make(meta)

    async def get_group(self, key: UUID, name: str, identity: str = "") -> MadeGroup:
        """Return a group, also to a name that may work in it in some partition only."""
        self.check_group(key, name, identity)
        await self._pay(identity, self._authorizer.rights(identity))
        return await self._groups.find(name)

    async def owned_groups(
        self, key: UUID, name: str, partition: int, identity: str = "", *, sent: ExitStack | None = None
    ) -> Groups:
        """Return the groups of this server, for a caller that may work in this group in a partition of this server.
        `sent`: see `fetch_marked`; None for a short answer as well."""
        self.check_group(key, name, identity)
        rights = self._authorizer.rights(identity)
        check_attend(rights, partition, name)
        await self._pay(identity, rights)
        pipeline = self._owner.pipeline(partition, None)
        usage = self._registry.usage_of(principal_of(identity), rights.quotas)
        await _hold(pipeline, usage, MARKED_BYTES_MAX, sent)
        return self._groups

    async def attend(self, link: AttendLink) -> None:
        """Serve one member of a consumer group to its end. Raise the error that ended it, after the member was sent it."""

        def admit() -> QuotaUsage:
            rights = self._authorizer.rights(link.identity)
            check_attend(rights, request.partition, request.group)
            return self._registry.usage_of(principal_of(link.identity), rights.quotas)

        try:
            found = await self._join_request(link)
            if found is None:
                return
            request = found
            self._check_key(request.cluster_key)
            check_join(request)
            admit()  # first: errors of owners say where they are
            member = await self._groups.join(link, request, admit)
        except WaltzError as error:
            await _dismiss(link, error)
            raise
        # No await since the rights were looked up, so no policy can have changed between.
        with self._authorizer.reviewing(member, link.identity):
            await member.serve()

    @staticmethod
    async def _join_request(link: AttendLink) -> JoinRequest | None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                frames = await link.receive()
        except TimeoutError:
            raise BadFrame(f"a member sent no request within {REQUEST_SECONDS:.0f} seconds") from None
        if frames is None:
            return None
        match list(frames):
            case [JoinRequest() as request]:
                return request
        raise BadFrame("the first frame of a member must be a join request, and nothing else before its answer")

    @staticmethod
    async def _request(link: MountLink) -> MountRequest | None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                frames = await link.receive()
        except TimeoutError:
            raise BadFrame(f"a client sent no request within {REQUEST_SECONDS:.0f} seconds") from None
        if frames is None:
            return None
        match frames:
            case [MountRequest() as request]:
                return request
        raise BadFrame("the first frame of a client must be a mount request, and nothing else before its answer")


def _check_rights(rights: Rights, request: MountRequest) -> None:
    """Check the rights that a mount needs from its beginning. A mount that takes the feed needs the right to append only
    when it appends."""
    if request.feed is FeedMode.NONE or request.asks:
        check_append(rights, request.partition)
    else:
        check_subscribe(rights, request.partition)


async def _hold(pipeline: Pipeline, usage: QuotaUsage, size: int, sent: ExitStack | None) -> None:
    """Wait until an answer of this size may be in memory. It counts until `sent` is closed; None for an answer that is
    handed over at once."""
    if sent is not None:
        answers = await pipeline.capacity.take_answer(usage, size)
        sent.callback(answers.give, size)


def check_join(request: JoinRequest) -> None:
    """Validate a request to join; raise if it is malformed."""
    if not is_name(request.group):
        raise BadArgument(f"{request.group[:TEXT_MAX]!a} is no name of a group", not_done="nothing was given out")
    if not 0 < len(request.member) <= TEXT_MAX or not request.member.isprintable():
        raise BadFrame(f"a member calls itself {request.member[:TEXT_MAX]!a}")
    if request.room is not None and request.room < 0:
        raise BadFrame(f"a member has room for {request.room} deliveries")


async def _dismiss(link: AttendLink, error: WaltzError) -> None:
    """Send the error to a member that was refused, and give it some time to notice."""
    try:
        async with asyncio.timeout(REFUSED_SECONDS):
            await link.send([Dismissed(error)])
            while await link.receive() is not None:
                pass
    except (TimeoutError, WaltzError):
        return


def token_of(secret: bytes, client: int, identity: str, epoch: int = 0, *, lap: int = 0) -> bytes:
    """Return the proof that the client id was given to a client of this identity, in this lap and with this epoch."""
    about = f"client {client} of {identity}" + (f" in epoch {epoch}" if epoch else "") + (f" in lap {lap}" if lap else "")
    return hmac.digest(secret, about.encode(), "sha256")
