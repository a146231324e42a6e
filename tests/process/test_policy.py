"""A policy against real daemons with certificates: who may do what at which door, and a right that is taken away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from tests.unit.mounting import batch_of
from tests.unit.policy_twin import allows
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.cluster.cluster import NO_VERSION, POLICY, Cluster
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import ClusterMeta, Membership, PolicyDocument, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import NotGranted, WaltzError
from waltzd.errors.operations import PolicyUnreadable
from waltzd.protocol.batches import Committals, FeedMode, Mounted, MountRequest, Refused, ServerFrame
from waltzd.protocol.channels import Parts
from waltzd.protocol.locks import Committed, Mode, lock_hash
from waltzd.protocol.policy import Grant, Pattern, Prefix, Verb
from waltzd.protocol.role import Role
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import AdminClient

SEED = 19
NAMES = ["app", "app-1", "app.b_c-D", "x" * 64, "anonymous", "ann", "0"]
"""The operator is called ann, too."""
PATTERNS = ["app", "app*", "app-*", "x*", "x" * 64, "anonymous", "ann", "*", "0"]
LOCKS = ["account", "account.eur", "order.7"]


def connect(files: Files) -> Callable[[str, UUID | None], ServerClient]:
    tls = files.tls(Role.CLIENT)
    return lambda address, key: ServerClient(address, key, tls=tls)


def drawn(chance: random.Random) -> tuple[Grant, ...]:
    def ranges() -> Parts | None:
        first = chance.randrange(PARTITIONS)
        return chance.choice([None, Parts(f"{first}"), Parts(f"{first}-{chance.randrange(first, PARTITIONS)}")])

    return tuple(
        Grant(
            names=tuple(Pattern(text) for text in chance.sample(PATTERNS, chance.randint(1, 2))),
            may=tuple(chance.sample(list(Verb), chance.randint(1, 2))),
            partitions=ranges(),
            lock_prefixes=chance.choice([None, (Prefix("account"),), ()]),
        )
        for _ in range(4)
    )


class Place:
    """A storage, a server, and the coordinator, all with certificates."""

    def __init__(self, authority: Authority, server: ServerDaemon, cluster: Cluster, *, is_framed: bool) -> None:
        self.authority = authority
        self.server = server
        self.cluster = cluster
        self.is_framed = is_framed
        self._files: dict[str, Files] = {}

    def files(self, name: str, role: Role = Role.CLIENT) -> Files:
        if name not in self._files:
            self._files[name] = self.authority.issue(KEY, role, name, file=f"{role}-{len(self._files)}")
        return self._files[name]

    async def write(self, *grants: Grant) -> None:
        await self.cluster.save_policy(PolicyDocument(grants=grants), await self.cluster.policy_version())

    def port(self, name: str) -> ServerClient:
        port = ServerClient(self.server.listen, KEY, tls=self.files(name).tls(Role.CLIENT))
        if self.is_framed:
            port.expect("one", self.server.stream_listen)
        return port

    async def counts(self, name: str, grants: tuple[Grant, ...]) -> None:
        """Wait until the server goes by these grants, as far as this name can tell."""
        wanted = [not any(allows(grants, name, verb, number) for verb in Verb) for number in range(PARTITIONS)]
        async with self.port(name) as port, asyncio.timeout(30):
            while [place.is_hidden for place in (await port.locate()).places] != wanted:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def place(
    zookeeper: LocalZooKeeper,
    storage: Daemon,
    make_server: Callable[..., ServerDaemon],
    authority: Authority,
    root: str,
    *,
    is_framed: bool,
) -> AsyncIterator[Place]:
    async with AdminClient(
        storage.admin_listen, KEY, tls=authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
    ) as admin:
        await admin.create_partitions(range(PARTITIONS))
    coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
    await coordinator.start()
    try:
        meta = ClusterMeta(name="policy", key=KEY, partitions=PARTITIONS, created="2026-01-01", format=1)
        s1 = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
        sets = {number: {"s1": Membership.MEMBER} for number in range(PARTITIONS)}
        cluster = await Cluster.create(coordinator, meta, storages=[s1], replicas=ReplicaSets(partitions=sets))
        settings = authority.issue(KEY, Role.SERVER, "one").settings | ({} if is_framed else {"stream_port": -1})
        server = make_server("one", hosts=zookeeper.hosts, cluster=root, **settings)
        await asyncio.to_thread(server.start)
        yield Place(authority, server, cluster, is_framed=is_framed)
    finally:
        await coordinator.close()


async def refusal(ask: Callable[[], object]) -> bool:
    """Whether it is refused for want of a grant; any other error is one of the test."""
    try:
        found = ask()
        assert asyncio.iscoroutine(found)
        await found
    except NotGranted:
        return True
    return False


async def mounted(port: ServerClient, partition: int, generation: int, client: tuple[int, bytes], **about: object) -> bool:
    """Whether a mount, and an append if there is one in `about`, is let in."""
    number, feed, lock = about["number"], about["feed"], about.get("lock")
    assert isinstance(number, int)
    assert isinstance(feed, FeedMode)
    stream = port.mount()
    try:
        request = MountRequest(
            cluster_key=KEY,
            partition=partition,
            generation=generation,
            client=client[0],
            token=client[1],
            number=number,
            mark=-1,
            feed=feed,
            credit=1 << 20,
        )
        await stream.send([request])
        frames: list[ServerFrame] = list(await stream.receive() or ())
        if isinstance(frames[0], Mounted) and about.get("appends"):
            locks = [[(lock_hash(str(lock), 1), Mode.APPEND)]] if lock is not None else []
            await stream.send([batch_of(b"x", locks=locks)])
            while not any(isinstance(frame, Committals | Refused) for frame in frames):
                frames += await stream.receive() or ()
        for frame in frames:
            if isinstance(frame, Refused):
                assert isinstance(frame.error, NotGranted), frame.error
                return False
        return True
    finally:
        stream.cancel()


@pytest.mark.parametrize("is_framed", [False, True], ids=["grpc", "frames"])
def test_each_name_at_each_door_of_each_partition(
    is_framed: bool,
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    chance, verdicts = random.Random(SEED), dict.fromkeys([True, False], 0)

    async def check(here: Place, name: str, grants: tuple[Grant, ...], number: int) -> None:
        def told(verb: Verb, partition: int, lock: str | None = None) -> bool:
            return allows(grants, name, verb, partition, lock)

        sees = [any(told(verb, partition) for verb in Verb) for partition in range(PARTITIONS)]
        async with here.port(name) as port:
            places = (await port.locate()).places
            assert [place.address is not None for place in places] == sees
            if not any(sees):
                assert await refusal(port.register)
                return
            found = await port.register()
            client = found.client, found.token
            for partition in range(PARTITIONS):
                where, at = f"{name} in {partition}: {grants}", places[partition].generation

                async def fetch(partition: int = partition) -> None:
                    async with aclosing(port.fetch(partition, 0)) as runs:
                        async for _ in runs:
                            return

                async def enters(partition: int = partition, at: int = at, **about: object) -> bool:
                    nonlocal number
                    number += 1
                    return await mounted(port, partition, at, client, number=number, **about)

                asked: list[tuple[bool, bool]] = [
                    (not await refusal(fetch), told(Verb.READ, partition)),
                    (not await refusal(partial(port.find_time, partition, 1)), told(Verb.READ, partition)),
                    (not await refusal(partial(port.high_water_mark, partition)), sees[partition]),
                    (await enters(feed=FeedMode.NONE, appends=True), told(Verb.APPEND, partition)),
                    (await enters(feed=FeedMode.RECORDS), told(Verb.SUBSCRIBE, partition)),
                    (await enters(feed=FeedMode.HEADS), told(Verb.SUBSCRIBE, partition)),
                    *[
                        (await enters(feed=FeedMode.NONE, appends=True, lock=lock), told(Verb.APPEND, partition, lock))
                        for lock in LOCKS
                    ],
                ]
                assert [is_let_in for is_let_in, _ in asked] == [is_right for _, is_right in asked], where
                for _, is_right in asked:
                    verdicts[is_right] += 1

    async def work() -> None:
        async with place(zookeeper, storage, make_server, authority, f"/policy/{is_framed}", is_framed=is_framed) as here:
            async with Client(here.server.listen, feed=FeedMode.NONE, connect=connect(here.files("app"))) as client:
                for partition in range(PARTITIONS):
                    assert isinstance(await client.append(b"before there was a policy", partition=partition), Committed)
            for turn in range(3):
                grants = drawn(chance)
                await here.write(*grants)
                for name in NAMES:
                    await here.counts(name, grants)
                    await check(here, name, grants, 1000 * turn)

    loop.run(work())
    assert min(verdicts.values()) > 50, verdicts


def test_a_right_is_taken_away_under_load_and_a_spoiled_policy_changes_nothing(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()

    def all_of(*names: str) -> Grant:
        return Grant(names=tuple(Pattern(name) for name in names), may=(Verb.APPEND, Verb.SUBSCRIBE))

    async def load(here: Place, name: str, told: dict[str, list[int]]) -> WaltzError:
        """Append until that is refused; the ids of what was committed are kept."""
        async with Client(here.server.listen, feed=FeedMode.NONE, connect=connect(here.files(name))) as client:
            while True:
                try:
                    found = await client.append(name.encode(), partition=0)
                except WaltzError as error:
                    return error
                if isinstance(found, Committed):
                    told[name].append(found.id)

    async def work() -> None:
        async with place(zookeeper, storage, make_server, authority, "/policy/taken", is_framed=True) as here:
            told: dict[str, list[int]] = {"keeps": [], "loses": []}
            await here.write(all_of("keeps", "loses"))
            loads = {name: asyncio.create_task(load(here, name, told)) for name in told}
            async with asyncio.timeout(60):
                while min(map(len, told.values())) < 20:
                    await asyncio.sleep(0.05)
                version = await here.cluster.policy_version()
                await here.cluster.coordinator.commit([Set(POLICY, b"nonsense", version)])
                kept = len(told["loses"])
                while len(told["loses"]) < kept + 20:
                    await asyncio.sleep(0.05)
                await here.write(all_of("keeps"))
                error = await loads["loses"]
            assert isinstance(error, NotGranted)
            assert "loses may not append to partition 0" in error.message
            last, going_on = max(told["loses"]), len(told["keeps"])
            async with asyncio.timeout(60):
                while len(told["keeps"]) < going_on + 20:
                    await asyncio.sleep(0.05)
            assert not loads["keeps"].done(), "who lost nothing goes on"
            operator = here.files("ann", Role.OPERATOR).tls(Role.OPERATOR)
            async with ServerClient(here.server.listen, KEY, tls=operator) as port:
                found = {
                    run.first_id + at: run.record(at).payload async for run in port.fetch(0, 0) for at in range(len(run))
                }
            mine = [id for id, payload in found.items() if payload == b"loses"]
            assert set(told["loses"]) <= set(mine)
            assert len(mine) <= len(told["loses"]) + 1, "what was in flight at the end, and nothing behind it"
            assert max(mine) <= last + len(told) + 1
            loads["keeps"].cancel()
            await asyncio.wait([loads["keeps"]])

    loop.run(work())


def test_a_server_that_starts_with_a_policy_it_cannot_read_lets_nobody_in(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()

    async def work() -> None:
        async with place(zookeeper, storage, make_server, authority, "/policy/closed", is_framed=True) as here:
            await here.cluster.save_policy(PolicyDocument(grants=()), NO_VERSION)
            await here.cluster.coordinator.commit([Set(POLICY, b'{"schema": 7}', 0)])
            await asyncio.to_thread(here.server.stop)
            await asyncio.to_thread(here.server.start)
            here.server.stream_listen = ""
            async with here.port("app") as app:
                with pytest.raises(PolicyUnreadable, match="schema 7"):
                    await app.locate()
            operator = here.files("ann", Role.OPERATOR).tls(Role.OPERATOR)
            async with ServerClient(here.server.listen, KEY, tls=operator) as port:
                await port.locate()
            await here.write(Grant(names=(Pattern("app"),), may=(Verb.APPEND,)))
            async with Client(here.server.listen, feed=FeedMode.NONE, connect=connect(here.files("app"))) as client:
                assert isinstance(await client.append(b"x", partition=0), Committed)

    loop.run(work())
