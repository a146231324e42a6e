"""`waltzctl create-cluster` against a real ZooKeeper and real storages."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.cli.example import examples
from tests.cli.outcome import refused
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.zookeeper import LocalZooKeeper
from waltzctl.placement.creation import ClusterSpec, create_cluster
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import FORMAT, ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import WaltzError
from waltzd.errors.operations import AlreadyThere, DiskFull
from waltzd.protocol.descriptions import StorageDescription
from waltzd.wire.storages import AdminClient

Tool = Callable[..., Any]
SILENT = "127.0.0.1:1"


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalZooKeeper]:
    local = LocalZooKeeper(tmp_path_factory.mktemp("coordinator") / "zookeeper")
    try:
        yield local.start()
    finally:
        local.kill()


ROOTS = itertools.count()


class World:
    """Three storages, and a root of its own in ZooKeeper."""

    def __init__(self, zookeeper: LocalZooKeeper, daemons: dict[str, Daemon]) -> None:
        self.hosts, self.root = zookeeper.hosts, f"/test/{next(ROOTS)}"
        self.daemons = daemons

    def storage(self, name: str, group: str = "") -> list[str]:
        daemon = self.daemons[name]
        return ["--storage", ",".join([f"{name}={daemon.listen}", daemon.admin_listen, *([group] if group else [])])]

    @property
    def place(self) -> list[str]:
        return ["--coordinator", self.hosts, "--root", self.root]

    @property
    def usual(self) -> list[str]:
        given = [word for name in self.daemons for word in self.storage(name)]
        return ["create-cluster", *self.place, "--name", "trial", "--partitions", str(PARTITIONS), *given]

    def wish(self, **changes: Any) -> ClusterSpec:
        metas = tuple(
            StorageMeta(name=name, listen=daemon.listen, admin_listen=daemon.admin_listen, group=name)
            for name, daemon in self.daemons.items()
        )
        return ClusterSpec(**{"name": "trial", "partitions": PARTITIONS, "replication": 3, "storages": metas, **changes})

    @contextlib.asynccontextmanager
    async def cluster(self) -> AsyncIterator[Cluster]:
        coordinator = ZooKeeperCoordinator(self.hosts, self.root)
        await coordinator.start()
        try:
            yield Cluster(coordinator)
        finally:
            await coordinator.close()

    def is_written_down(self) -> bool:
        async def look() -> bool:
            async with self.cluster() as cluster:
                return await cluster.coordinator.get("/") is not None

        return loop.run(look())

    def assigned(self) -> dict[str, list[int]]:
        async def look(daemon: Daemon) -> list[int]:
            async with daemon.admin() as admin:
                return [found.partition for found in (await admin.describe()).assigned]

        return {name: loop.run(look(daemon)) for name, daemon in self.daemons.items()}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Daemon]]:
    home = tmp_path_factory.mktemp("storages")
    with contextlib.ExitStack() as ends:
        made = {name: Daemon(home / name) for name in ("one", "three", "two")}
        for name, daemon in made.items():
            daemon.settings["name"] = name
            ends.enter_context(daemon)
        yield made


@pytest.fixture
def world(zookeeper: LocalZooKeeper, daemons: dict[str, Daemon]) -> Iterator[World]:
    """The storages have no partitions, whatever a test before did to them."""
    yield World(zookeeper, daemons)

    async def empty(daemon: Daemon) -> None:
        async with daemon.admin() as admin:
            there = [found.partition for found in (await admin.describe()).assigned]
            if there:
                assert set((await admin.remove_partitions(there, delete_files=True)).values()) == {None}

    for daemon in daemons.values():
        if daemon.process is None:
            daemon.start()
        loop.run(empty(daemon))


def as_json(text: str) -> Any:
    found = json.loads(text)
    assert found["version"] == 1
    return found


# -- a cluster is made -------------------------------------------------------------------------------------------------


def test_a_cluster_from_a_dry_run_to_a_description(world: World, waltzctl: Tool) -> None:
    dry = waltzctl(*world.usual, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert dry.out.startswith(f"would create: cluster trial, 4 partitions, format {FORMAT}\n")
    assert "Nothing was written." in dry.out
    assert not world.is_written_down()
    assert world.assigned() == {"one": [], "three": [], "two": []}

    made = waltzctl(*world.usual)
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith(f"created: cluster trial, 4 partitions, format {FORMAT}\n")
    assert str(KEY) in made.out
    assert f"  coordinator: {world.hosts}\n  cluster: {world.root}\n" in made.out
    assert max(len(line) for line in made.out.splitlines() if line.startswith(" ")) <= 80
    everywhere = list(range(PARTITIONS + 1))  # the last one is the group log
    assert world.assigned() == {"one": everywhere, "three": everywhere, "two": everywhere}

    again = as_json(waltzctl(*world.usual, "--key", KEY, "-o", "json").out)
    assert (again["result"], again["cluster_key"]) == ("there-already", str(KEY))
    assert [storage["made"] for storage in again["storages"]] == [[], [], []]
    assert again["replicas"] == {str(number): ["one", "three", "two"] for number in range(PARTITIONS)}
    assert again["group_log"] == ["one", "three", "two"]
    assert [storage["partitions"] for storage in again["storages"]] == [list(range(PARTITIONS))] * 3

    described = waltzctl("status", *world.place)
    assert described.code == 10, "nobody owns the partitions"
    assert "DOWN: 0 of 4 partitions are open, the group log is not; 0 servers and 3 storages answer" in described.out
    found = as_json(waltzctl("status", *world.place, "-o", "json").out)["cluster"]
    assert (found["is_healthy"], found["name"], found["cluster_key"]) == (False, "trial", str(KEY))
    assert [storage["is_up"] for storage in found["storages"]] == [True, True, True]


def test_a_storage_that_cannot_hold_the_group_log_is_refused(
    world: World, waltzctl: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AdminClient.describe

    async def describe(self: AdminClient) -> StorageDescription:
        said = await right(self)
        return replace(said, keeps_group_log=said.name != "two")

    monkeypatch.setattr(AdminClient, "describe", describe)
    refused(waltzctl(*world.usual), 5, "W2303 two cannot hold a group log", "nothing was written")
    assert not world.is_written_down()
    assert world.assigned() == {"one": [], "three": [], "two": []}


def test_a_storage_that_went_away_is_part_of_the_picture(world: World, waltzctl: Tool) -> None:
    assert waltzctl(*world.usual).code == 0
    world.daemons["two"].kill()
    described = waltzctl("status", *world.place)
    assert described.code == 10
    assert "storage two does not answer at" in described.out


def test_what_was_interrupted_is_completed(world: World, waltzctl: Tool) -> None:
    """The documents are there, the replicas are not."""

    async def write_down() -> None:
        wish = world.wish()
        sets = ReplicaSets(
            partitions={0: {"one": Membership.MEMBER}, 1: {"one": Membership.MEMBER, "two": Membership.LEARNER}}
        )
        meta = ClusterMeta(name="trial", key=KEY, partitions=PARTITIONS, created="2026-01-01")
        async with world.cluster() as cluster:
            await Cluster.create(cluster.coordinator, meta, storages=wish.storages, replicas=sets)

    loop.run(write_down())
    made = as_json(waltzctl(*world.usual, "-o", "json").out)
    assert made["result"] == "there-already"
    assert world.assigned() == {"one": [0, 1], "three": [], "two": [1]}, "as written down, not as one would plan it now"
    assert made["created"] == "2026-01-01"


def test_of_two_at_once_exactly_one_wins(world: World) -> None:
    async def make(name: str) -> str:
        async with world.cluster() as cluster:
            try:
                await create_cluster(cluster.coordinator, world.wish(name=name), created="2026-01-01")
            except AlreadyThere:
                return ""
        return name

    async def race() -> None:
        names = await asyncio.gather(make("blue"), make("green"))
        async with world.cluster() as cluster:
            assert sorted(names) == sorted(["", (await cluster.meta()).name])

    loop.run(race())


def test_the_examples_of_the_help_run(world: World, waltzctl: Tool) -> None:
    one = world.daemons["one"]
    places = {"127.0.0.1:2181": world.hosts, "127.0.0.1:55280": one.listen, "127.0.0.1:55281": one.admin_listen}
    pattern = re.compile("|".join(map(re.escape, places)))
    for arguments in examples(waltzctl, ["create-cluster"]):
        typed = [pattern.sub(lambda found: places[found[0]], argument) for argument in arguments]
        done = waltzctl(*typed, "--root", world.root)
        assert (done.code, done.err) == (0, ""), typed


# -- what cannot be done -----------------------------------------------------------------------------------------------


def test_silent_storages_and_a_proposed_key(world: World, waltzctl: Tool) -> None:
    told = waltzctl(
        "create-cluster", *world.place, "--name", "trial", "--partitions", "8", "--replicas", "1",
        "--storage", f"alone=127.0.0.1:2,{SILENT}",
    )  # fmt: skip
    refused(told, 6, "W4001 alone cannot be reached", "`partitions: 8`")
    proposed = re.search(r"`cluster_key: (\S+)`", told.err)
    assert proposed
    assert UUID(proposed[1]).version == 4
    told = waltzctl(*world.usual, "--storage", f"four=127.0.0.1:2,{SILENT}")
    refused(told, 6, "four cannot be reached", f"`cluster_key: {KEY}`")
    assert not world.is_written_down()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (["--key", "00000000-0000-0000-0000-000000000001"], 4, "W2002"),
        (["--partitions", "5"], 2, "one was set up for a cluster of 4 partitions, not 5"),
        (["--replicas", "4"], 2, "W1001"),
        (["--name", "no name"], 2, "'no name' is not a name"),
        (["--storage", "one"], 2, "'one' is not a storage"),
        (["--storage", "four=127.0.0.1:2"], 2, "is not a storage"),
        (["--storage", "four=127.0.0.1:2,nonsense"], 2, "'nonsense' is not an address"),
        (["--storage", "four=127.0.0.1:2,127.0.0.1:3,"], 2, "the group has no name"),
        (["--root", "waltz"], 2, "'waltz' is not a path"),
        (["--coordinator", "nowhere:1/x"], 2, "is not a list of ZooKeeper addresses"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistyped(world: World, waltzctl: Tool, change: list[str], code: int, said: str) -> None:
    refused(waltzctl(*world.usual, *change), code, said)
    assert not world.is_written_down()
    assert world.assigned() == {"one": [], "three": [], "two": []}


def test_one_storage_under_two_names(world: World, waltzctl: Tool) -> None:
    one, two = world.daemons["one"], world.daemons["two"]
    refused(waltzctl(*world.usual, "--storage", f"four=127.0.0.1:2,{one.admin_listen}"), 2, "the same admin address")
    refused(waltzctl(*world.usual, "--storage", f"four={two.listen},127.0.0.1:2"), 2, "the same listen address")
    refused(waltzctl(*world.usual, "--storage", "one=127.0.0.1:2,127.0.0.1:3"), 2, "the same name")
    again = ",".join(address.replace("127.0.0.1", "localhost") for address in (one.listen, one.admin_listen))
    refused(waltzctl(*world.usual, "--storage", f"four={again}"), 4, "this is the storage one", str(one.directory))
    assert not world.is_written_down()


def test_crossed_addresses(world: World, waltzctl: Tool, tmp_path: Path) -> None:
    """Of storages that know their names, and of new ones, which answer at both of their addresses as one process."""

    def crossed(first: Daemon, second: Daemon, *names: str) -> Any:
        return waltzctl(
            "create-cluster", *world.place, "--name", "trial", "--partitions", str(PARTITIONS), "--replicas", "2",
            "--storage", f"{names[0]}={first.listen},{second.admin_listen}",
            "--storage", f"{names[1]}={second.listen},{first.admin_listen}", "--dry-run",
        )  # fmt: skip

    refused(crossed(world.daemons["one"], world.daemons["two"], "one", "two"), 4, "W2085", "this is the storage")
    with Daemon(tmp_path / "s1") as first, Daemon(tmp_path / "s2") as second:
        refused(crossed(first, second, "s1", "s2"), 4, "W2085", "are addresses of two storages", "a storage without a name")
    assert not world.is_written_down()


def test_the_two_addresses_the_wrong_way_round(world: World, waltzctl: Tool) -> None:
    one = world.daemons["one"]
    told = waltzctl(
        "create-cluster", *world.place, "--name", "trial", "--partitions", str(PARTITIONS), "--replicas", "1",
        "--storage", f"one={SILENT},{one.admin_listen}",
    )  # fmt: skip
    refused(told, 6, f"one answers at {one.admin_listen}, but not at {SILENT}", "`listen` address first")
    told = waltzctl(
        "create-cluster", *world.place, "--name", "trial", "--partitions", str(PARTITIONS), "--replicas", "1",
        "--storage", f"one={one.admin_listen},{one.listen}", "--dry-run",
    )  # fmt: skip
    refused(told, 2, f"LISTEN and ADMIN of one are swapped: {one.listen} is its LISTEN address")
    told = waltzctl(
        "create-cluster", *world.place, "--name", "trial", "--partitions", str(PARTITIONS), "--replicas", "1",
        "--storage", f"one={SILENT},{one.listen}", "--dry-run",
    )  # fmt: skip
    refused(told, 4, f"W4004 the storage one at {one.listen} does not know this call: another port is there")
    assert not world.is_written_down()


def test_a_cluster_that_is_there_is_not_changed(world: World, waltzctl: Tool) -> None:
    assert waltzctl(*world.usual).code == 0
    refused(waltzctl(*world.usual, "--name", "other"), 4, "W2140", "trial exists with another name: trial, not other")
    fewer = ["create-cluster", *world.place, "--name", "trial", "--partitions", str(PARTITIONS), "--replicas", "1"]
    refused(waltzctl(*fewer, *world.storage("one")), 4, "W2140", "cluster trial exists with another list of storages")
    refused(waltzctl(*fewer, *world.storage("one", "rack"), *world.storage("two"), *world.storage("three")), 4, ",rack")


def test_another_cluster_at_this_root(world: World, waltzctl: Tool) -> None:
    async def write_down() -> None:
        meta = ClusterMeta(name="older", key=UUID(int=1), partitions=1, created="2026-01-01")
        async with world.cluster() as cluster:
            await Cluster.create(cluster.coordinator, meta)

    loop.run(write_down())
    refused(waltzctl(*world.usual), 4, "W2023", "older")
    assert world.assigned() == {"one": [], "three": [], "two": []}


def test_storages_of_a_cluster_whose_documents_were_lost(world: World, waltzctl: Tool) -> None:
    async def serve() -> None:
        two = world.daemons["two"]
        async with two.admin() as admin, two.replicas() as replicas:
            assert await admin.create_partitions([3]) == {3: None}
            await replicas.open(3, 1, partitions=PARTITIONS)

    loop.run(serve())
    refused(waltzctl(*world.usual), 5, "W2020", "two has served partition 3 before")
    assert not world.is_written_down()


def test_replicas_that_nobody_has_used_are_no_obstacle(world: World, waltzctl: Tool) -> None:
    async def prepare() -> None:
        async with world.daemons["two"].admin() as admin:
            assert await admin.create_partitions([3]) == {3: None}

    loop.run(prepare())
    made = as_json(waltzctl(*world.usual, "-o", "json").out)
    assert {storage["name"]: storage["made"] for storage in made["storages"]}["two"] == [0, 1, 2]


def test_no_cluster_and_no_coordinator(world: World, waltzctl: Tool) -> None:
    refused(waltzctl("status", *world.place), 3, "W2026")


def test_an_error_on_a_storage_tells_that_the_cluster_is_written_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: AdminClient, partitions: list[int], **_: object) -> dict[int, WaltzError | None]:
        return {partition: DiskFull("no space") if partition == 2 else None for partition in partitions}

    monkeypatch.setattr(AdminClient, "create_partitions", refuse)

    async def make() -> None:
        async with world.cluster() as cluster:
            with pytest.raises(DiskFull, match="one, partition 2: no space") as caught:
                await create_cluster(cluster.coordinator, world.wish(), created="2026-01-01")
            assert "not all of its replicas" in caught.value.detail_not_done
            assert "run this again" in caught.value.detail_next_step
            assert (await cluster.meta()).name == "trial"

    loop.run(make())
