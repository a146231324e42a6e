"""`waltzctl cluster set --keep-local` on real daemons: what leaves the storages, through a kill and with a new replica."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from waltzctl.local_cluster.local import LocalCluster
from waltzd import BlockingClient

Tool = Callable[..., Any]
PATIENCE_SECONDS = 60
KEPT = 1 << 20
SESSION_BYTES = 1 << 20
BATCH = [b"x" * 1000] * 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Small segments, and sessions that follow upon each other often: low marks move with these."""
    settings: dict[str, dict[str, object]] = {
        "storage": {"archive": str(tmp_path_factory.mktemp("archive"))},
        "server": {"session_seconds": 30, "segment_bytes_max": 50_000, "session_bytes_max": SESSION_BYTES},
    }
    made = LocalCluster.make(
        tmp_path_factory.mktemp("cluster") / "cluster", partitions=1, storages=4, servers=1, settings=settings
    )
    try:
        made.start()
        yield made
    finally:
        made.kill()


def told(waltzctl: Tool, cluster: LocalCluster, *words: str) -> Any:
    return json.loads(waltzctl(*words, "--directory", str(cluster.directory), "-o", "json").out)


def floor(waltzctl: Tool, cluster: LocalCluster) -> int:
    found: int = told(waltzctl, cluster, "archive", "status")["partitions"][0]["floor"]
    return found


def files(cluster: LocalCluster) -> dict[str, int]:
    """Bytes of the replica on each storage that has one."""
    found = {}
    for directory in cluster.storage_directories:
        paths = [*directory.glob("0/*.seg"), *directory.glob("0/*.idx")]
        if paths:
            found[directory.parent.name] = sum(path.stat().st_size for path in paths if path.exists())
    return found


def fill(client: BlockingClient, batches: int) -> None:
    for _ in range(batches):
        assert client.append_many(BATCH, partition=0).committed == len(BATCH)


def until(what: Callable[[], Any], why: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < ends, why()
        time.sleep(0.2)


def test_what_is_not_kept_leaves_the_disks(waltzctl: Tool, cluster: LocalCluster) -> None:
    where = ["--directory", str(cluster.directory)]
    refused = waltzctl("cluster", "set", "--keep-local", "1MiB", "--yes", *where)
    assert (refused.code, "nothing of the cluster" in refused.err) == (5, True), refused.err
    for wrong in ("1 MiB", "7x", ""):
        assert waltzctl("cluster", "set", "--keep-local", wrong, "--yes", *where).code == 2
    with BlockingClient(cluster.server_addresses) as client:
        fill(client, 30)  # 3 MB
        until(lambda: told(waltzctl, cluster, "archive", "status")["partitions"][0]["archived_to"], lambda: "no archive")
        done = waltzctl("cluster", "set", "--keep-local", "1MiB", "--yes", *where)
        assert done.code == 0, done.err
        assert "keep 1MiB of the log" in done.out + done.err
        until(lambda: floor(waltzctl, cluster) > 0, lambda: waltzctl("archive", "status", *where).out)

        victim = sorted(files(cluster))[0]
        cluster.daemons[victim].kill()  # whatever it was at
        fill(client, 10)
        cluster.start_one(victim)
        fill(client, 10)

        empty = next(name for name in cluster.daemons if name.startswith("storage") and name not in files(cluster))
        assert waltzctl("partition", "assign", "0", "--to", empty, "--yes", *where).code == 0
        before = floor(waltzctl, cluster)
        fill(client, 10)

        def is_level() -> bool:
            sizes = files(cluster)
            return (
                len(sizes) == 4
                and floor(waltzctl, cluster) > before
                and max(sizes.values()) <= KEPT * 1.1 + SESSION_BYTES + 200_000
            )

        until(is_level, lambda: (files(cluster), told(waltzctl, cluster, "archive", "status")))
    described = told(waltzctl, cluster, "partition", "describe", "0")
    assert described["is_open"], described
    assert waltzctl("archive", "status", *where).code == 0
