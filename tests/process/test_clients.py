"""Applications with certificates against real daemons: who is connected, the newest instance, quotas and shares. What is
asserted of quotas are counts that no machine can be too slow for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process.certificates import Authority
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.test_policy import Place, connect, place
from tests.process.zookeeper import LocalZooKeeper
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.errors import Superseded
from waltzd.errors.operations import TooManyCallers
from waltzd.protocol.batches import FeedMode, MountRequest, Refused
from waltzd.protocol.descriptions import ClientList
from waltzd.protocol.locks import Committed
from waltzd.protocol.policy import Amount, Grant, Pattern, Quotas, Verb
from waltzd.protocol.role import Role
from waltzd.wire.servers import ServerAdminClient

Make = Callable[..., Any]


def client(here: Place, name: str, *, partitions: tuple[int, ...] = (0,), **settings: Any) -> Client:
    return Client(
        here.server.listen,
        feed=FeedMode.NONE,
        partitions=partitions,
        connect=connect(here.files(name)),
        settings=ClientSettings(**settings),
    )


async def told(here: Place) -> ClientList:
    operator = here.files("ann", Role.OPERATOR).tls(Role.OPERATOR)
    async with ServerAdminClient(here.server.admin_listen, KEY, tls=operator) as admin:
        return await admin.clients()


def in_place(
    zookeeper: LocalZooKeeper, make_daemon: Make, make_server: Make, path: Path, root: str, work: Callable[[Place], Any],
    *, is_framed: bool = True,
) -> None:  # fmt: skip
    authority = Authority(path / "ca")
    storage: Daemon = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()

    async def run() -> None:
        async with place(zookeeper, storage, make_server, authority, root, is_framed=is_framed) as here:
            await work(here)

    loop.run(run())


@pytest.mark.parametrize("is_framed", [False, True], ids=["grpc", "frames"])
def test_names_of_certificates_are_seen_and_only_the_newest_lives(
    is_framed: bool, zookeeper: LocalZooKeeper, make_daemon: Make, make_server: Make, tmp_path: Path
) -> None:
    async def work(here: Place) -> None:
        async with client(here, "billing", instance="one", exclusive=True) as one, client(here, "audit") as other:
            assert isinstance(await one.append(b"1", partition=0), Committed)
            assert isinstance(await other.append(b"2", partition=0), Committed)
            found = {(each.name, each.instance): each for each in (await told(here)).clients if each.role == "client"}
            assert found["billing", "one"].state == "live"
            assert found["billing", "one"].peer.startswith("127.0.0.1:")
            assert "audit" in {name for name, _ in found}
            async with client(here, "billing", instance="two", exclusive=True) as two:
                assert isinstance(await two.append(b"3", partition=0), Committed)
                with pytest.raises(Superseded):
                    await one.append(b"4", partition=0)
                assert isinstance(await other.append(b"5", partition=0), Committed), "another name is not concerned"
            here.server.stop()
            here.server.start()
            async with client(here, "billing", instance="three", exclusive=True) as three:
                assert isinstance(await three.append(b"6", partition=0), Committed)
                assert three.topology.places[0].generation > 0

    in_place(zookeeper, make_daemon, make_server, tmp_path, f"/clients/names-{is_framed}", work, is_framed=is_framed)


def test_a_flooder_gets_its_quota_and_a_quiet_name_does_not_wait(
    zookeeper: LocalZooKeeper, make_daemon: Make, make_server: Make, tmp_path: Path
) -> None:
    rate = 200

    async def flood(flooder: Client, counted: list[int]) -> None:
        while True:
            await flooder.append(b"x" * 100, partition=0)
            counted.append(1)

    async def work(here: Place) -> None:
        bounds = Quotas(transactions_per_second=Amount(rate))
        await here.write(
            Grant(names=(Pattern("flooder"),), may=tuple(Verb), quotas=bounds),
            Grant(names=(Pattern("quiet"),), may=tuple(Verb)),
        )
        await here.counts("flooder", (Grant(names=(Pattern("flooder"),), may=tuple(Verb)),))
        async with client(here, "flooder") as flooder, client(here, "quiet") as quiet:
            counted: list[int] = []
            began = time.monotonic()
            floods = [asyncio.create_task(flood(flooder, counted)) for _ in range(50)]
            for _ in range(100):
                assert isinstance(await quiet.append(b"y", partition=0), Committed)
            while len(counted) < 3 * rate:
                await asyncio.sleep(0.05)
            passed = time.monotonic() - began
            for task in floods:
                task.cancel()
            await asyncio.wait(floods)
            assert len(counted) <= rate * (passed + 1) + 50
            uses = {use.name: use for use in (await told(here)).names}
            assert uses["flooder"].slowed_ms > 0
            assert uses["quiet"].slowed_ms == 0

    in_place(zookeeper, make_daemon, make_server, tmp_path, "/clients/flooder", work)


def test_idle_mounts_of_one_name_leave_room_for_another(
    zookeeper: LocalZooKeeper, make_daemon: Make, make_server: Make, tmp_path: Path
) -> None:
    mounts_max = 20

    async def work(here: Place) -> None:
        async with client(here, "victim", partitions=tuple(range(PARTITIONS))) as victim:
            for partition in range(PARTITIONS):  # each is open then
                assert isinstance(await victim.append(b"x", partition=partition), Committed)
        async with AsyncExitStack() as ends:
            port = await ends.enter_async_context(here.port("squatter"))
            refused = 0
            for number in range(2 * mounts_max):
                found, places = await port.register(), (await port.locate()).places
                stream = port.mount()
                ends.callback(stream.cancel)
                await stream.send(
                    [
                        MountRequest(
                            cluster_key=KEY,
                            partition=number % PARTITIONS,
                            generation=places[number % PARTITIONS].generation,
                            client=found.client,
                            token=found.token,
                            number=1,
                            mark=-1,
                            feed=FeedMode.NONE,
                            credit=0,
                        )
                    ]
                )
                answers = await stream.receive()
                assert answers is not None
                answer = answers[0]
                if isinstance(answer, Refused):
                    assert isinstance(answer.error, TooManyCallers)
                    refused += 1
            assert refused == 2 * mounts_max - 16, "four for each that is free"
            async with client(here, "victim") as victim:
                for number in range(20):
                    assert isinstance(await victim.append(b"%d" % number, partition=0), Committed)

    in_place(zookeeper, make_daemon, partial(make_server, mounts_max=mounts_max), tmp_path, "/clients/idle", work)
