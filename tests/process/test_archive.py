"""A bucket of an S3 server as the archive of real daemons: storages are killed in the middle of uploads, and then it is
away for a while. Archives in directories: `waltzctl archive` and chaos."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.cluster import PATIENCE_SECONDS, Cluster
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd import BlockingClient
from waltzd.archive.location import open_store
from waltzd.archive.manifest import Entry
from waltzd.archive.store import Store
from waltzd.archive.verification import check_piece, survey
from waltzd.client import loop
from waltzd.protocol.descriptions import ArchiveCheck
from waltzd.wire.storages import ReplicaClient

moto = pytest.importorskip("moto.server", reason="the S3 server comes with the packages of developers")
BATCH, BYTES, SEGMENT_BYTES = 20, 1000, 40_000
BUCKETS = (f"archive-{number}" for number in itertools.count())


def made(directory: Path, store: str) -> Cluster:
    """One partition in small segments."""
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive": store},
        "server": {"session_seconds": 30, "segment_bytes_max": SEGMENT_BYTES},
    }
    return Cluster(LocalCluster.make(directory / "cluster", partitions=1, servers=1, settings=settings))


def append(client: BlockingClient, batches: int) -> None:
    for _ in range(batches):
        assert client.append_many([bytes(BYTES)] * BATCH, partition=0).committed == BATCH


async def reached(cluster: Cluster, last_id: int) -> None:
    """Archived up to this id, or further, and nothing is wrong."""

    def is_there(found: ClusterSnapshot) -> bool:
        owned = found.partitions[0].reported
        return owned is not None and owned.archived is not None and owned.archived.last_id >= last_id

    await cluster.until(f"id {last_id} is archived", is_there)


def sealed(cluster: Cluster) -> list[int]:
    """First ids of the segments that are sealed on every storage."""
    held = [
        sorted(int(path.stem) for path in (directory / "0").glob("*.seg"))[:-1]
        for directory in cluster.local.storage_directories
    ]
    return min(held, key=len)


def whole(store: Store) -> list[Entry]:
    """The pieces of the archive, once every byte of each is seen to be right."""
    found = survey(store)
    assert found.flaws == []
    for piece in found.pieces[0]:
        assert check_piece(store, found.label, 0, piece, is_quick=False) is None
    assert [piece.first for piece in found.pieces[0]] == [0, *(piece.last + 1 for piece in found.pieces[0][:-1])]
    return found.pieces[0]


class Bucket:
    """An S3 server that can go away, with one bucket. What is in it stays."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Its address and its credentials stand in the environment, from which daemons have them."""
    made = Bucket(next(BUCKETS))
    settings = {"ACCESS_KEY_ID": "who", "SECRET_ACCESS_KEY": "what", "REGION": "us-east-1", "ENDPOINT": made.endpoint}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    import boto3

    boto3.client("s3", endpoint_url=made.endpoint, region_name="us-east-1").create_bucket(Bucket=made.name)
    yield made
    made.stop()


def test_a_bucket_is_an_archive_through_kills_and_while_it_is_away_the_log_goes_on(tmp_path: Path, bucket: Bucket) -> None:
    place = f"s3://{bucket.name}/orders"
    cluster = made(tmp_path, place)
    try:
        cluster.start()
        with BlockingClient(cluster.server_addresses) as client:
            append(client, 10)
            wait_for_upload(open_store(place))
            for name in cluster.storage_names:  # one of them is at it
                cluster.kill(name)
            for name in cluster.storage_names:
                cluster.spawn(name)
            append(client, 5)
            loop.run(reached(cluster, 0))
            bucket.stop()
            append(client, 5)
            loop.run(cluster.until("the archive is said to stand", lambda found: trouble(found).find("W2260") > 0))
            append(client, 5)
            bucket.start()
        loop.run(reached(cluster, sealed(cluster)[-1] - 1))
        assert trouble(loop.run(cluster.local.snapshot())) == ""
        store = open_store(place)
        pieces = whole(store)
        loop.run(check_looking(cluster, store, pieces))
    finally:
        cluster.close()


def wait_for_upload(store: Store) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not store.list("partition-0/segment"):
        assert time.monotonic() < ends, "nothing is uploaded"


def trouble(found: ClusterSnapshot) -> str:
    owned = found.partitions[0].reported
    return "" if owned is None else owned.archive_trouble


async def check_looking(cluster: Cluster, store: Store, pieces: list[Entry]) -> None:
    """What a storage sees of the archive, asked as by an owner: one that comes after those that there were."""
    owned = (await cluster.local.snapshot()).partitions[0].reported
    assert owned is not None
    assert owned.archived is not None
    address = cluster.local.blueprint.addresses(cluster.storage_names[0])[0]
    session = owned.session + 1000
    async with ReplicaClient(address, cluster.key) as replicas:
        await replicas.open(0, session, partitions=1)
        assert await replicas.check_archive(0, owned.archived, 0, session=session) == ArchiveCheck(last_id=pieces[-1].last)
        store.remove(pieces[1].name(0))
        found = await replicas.check_archive(0, owned.archived, 0, session=session)
        assert (found.last_id, pieces[1].name(0) in found.missing) == (pieces[0].last, True)
