"""`waltzctl partition rescue` against real daemons: the log ends where the last copy at hand ends, and goes on under
timeline 2. What an old copy holds above the fork is set aside when that copy comes back."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.outcome import until
from waltzctl.local_cluster.local import LocalCluster
from waltzd import BlockingClient
from waltzd.protocol.locks import Committed

Tool = Callable[..., Any]
Acknowledged = dict[tuple[int, int], str]
"""Payload of each acknowledged transaction, by partition and id."""
PARTITIONS, SERVERS = range(2), ("server-1", "server-2")
SETTINGS: dict[str, dict[str, object]] = {
    "storage": {"segment_bytes_max": "64KiB", "reserve_bytes": "1MiB"},
    "server": {"segment_bytes_max": "64KiB"},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster.make(tmp_path / "c", partitions=len(PARTITIONS), settings=SETTINGS)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@contextmanager
def load(cluster: LocalCluster, name: str, acknowledged: Acknowledged) -> Iterator[None]:
    """Append to both partitions until the block ends."""
    stop = threading.Event()

    def write(partition: int) -> None:
        number = 0
        with BlockingClient(cluster.server_addresses) as client:
            while not stop.is_set():
                text = f"{name} {partition}:{number} ".ljust(200, ".")
                outcome = client.append(text.encode(), partition=partition)
                if isinstance(outcome, Committed):
                    acknowledged[partition, outcome.id] = text
                number += 1

    with ThreadPoolExecutor(len(PARTITIONS)) as threads:
        writers = [threads.submit(write, partition) for partition in PARTITIONS]
        try:
            yield
        finally:
            stop.set()
    for writer in writers:
        writer.result()


def last_id(acknowledged: Acknowledged, partition: int) -> int:
    return max((id_ for number, id_ in list(acknowledged) if number == partition), default=-1)


def until_acknowledged(acknowledged: Acknowledged, more: int) -> None:
    """Until both partitions have acknowledged this many transactions more."""
    wanted = {partition: last_id(acknowledged, partition) + more for partition in PARTITIONS}
    until(lambda: all(last_id(acknowledged, partition) >= least for partition, least in wanted.items()))


def test_the_log_goes_on_under_timeline_2_and_an_old_copy_is_set_aside(
    cluster: LocalCluster, waltzctl: Tool, tmp_path: Path
) -> None:
    place = ("--directory", cluster.directory)
    data = {name: cluster.directory / name / "data" for name in cluster.blueprint.storage_names}
    before, after = Acknowledged(), Acknowledged()

    # storage-1 is stopped early; then the owners die with both other storages, and nobody is left who knows more.
    with load(cluster, "before", before):
        until_acknowledged(before, 300)
        cluster.daemons["storage-1"].ask_to_end()
        assert cluster.daemons["storage-1"].wait_end(30)
        until_acknowledged(before, 600)
    for name in (*SERVERS, "storage-2", "storage-3"):
        cluster.daemons[name].kill()
    data["storage-2"].rename(tmp_path / "old")
    shutil.rmtree(data["storage-3"])
    for name in ("storage-1", *SERVERS):
        cluster.start_one(name)
    until(lambda: "0 of 2 partitions are open" in waltzctl("status", *place).out)
    refused = waltzctl("txn", "append", "0", "x", "--timeout", "1", *place)
    assert (refused.code != 0, "Traceback" in refused.err) == (True, False)

    dry = waltzctl("partition", "rescue", "0-1", "--dry-run", *place)
    assert dry.code == 0, dry.err
    assert "begin timeline 2" in dry.out
    assert "only storage-2, storage-3 may hold" in dry.out
    told = waltzctl("partition", "rescue", "0-1", "--confirm", "local/0-1", "--reason", "two disks", "-o", "json", *place)
    assert told.code == 0, told.err
    marks = {one["partition"]: one["mark"] for one in json.loads(told.out)["partitions"]}
    for partition in PARTITIONS:
        assert 299 <= marks[partition] < last_id(before, partition), "an acknowledged part is given up"

    # The log goes on at the fork, under the same ids as before with other transactions.
    with load(cluster, "after", after):
        until_acknowledged(after, 300)
        tmp_path.joinpath("old").rename(data["storage-2"])
        cluster.start_one("storage-2")
        cluster.start_one("storage-3")  # with an empty directory
        until(lambda: levels(waltzctl, cluster) == [3, 3, 3])  # the group log by itself
        until_acknowledged(after, 100)
    for partition in PARTITIONS:
        described = json.loads(waltzctl("partition", "describe", str(partition), "-o", "json", *place).out)
        (timeline,) = described["recorded"]["timelines"]
        assert (timeline["number"], timeline["fork"], timeline["cause"]) == (2, marks[partition], "partition rescue")
        assert min(id_ for number, id_ in after if number == partition) > marks[partition]
    told = waltzctl("status", *place)
    assert (told.code, "an operator ended the log of partitions 0-1" in " ".join(told.out.split())) == (0, True), told.out
    told = waltzctl("partition", "describe", "0", *place)
    assert "timeline 2: begun by partition rescue at" in told.out, told.out
    told = waltzctl("txn", "get", "0", "0", *place)
    assert "partition 0, timeline 2: begun by partition rescue at" in told.err, told
    assert waltzctl("txn", "get", "0", "0", "-o", "json", *place).err == ""

    # What storage-2 held above the fork is set aside; storage-1 and storage-3 had nothing to set aside.
    described = json.loads(waltzctl("storage", "describe", "storage-2", "-o", "json", *place).out)
    aside = {one["name"]: one for one in described["set_aside"]}
    assert {name.partition(".")[0] for name in aside} == {"0", "1"}, described
    assert all(one["bytes"] > 0 for one in aside.values())
    for partition in PARTITIONS:
        (name,) = [name for name in aside if name.startswith(f"{partition}.")]
        kept = b"".join(path.read_bytes() for path in (data["storage-2"] / name).glob("*.seg"))
        lost = [text for (number, id_), text in before.items() if number == partition and id_ > marks[partition]]
        assert lost
        assert all(text.encode() in kept for text in lost)
    assert "set aside: " in waltzctl("storage", "describe", "storage-2", *place).out
    for name in ("storage-1", "storage-3"):
        assert json.loads(waltzctl("storage", "describe", name, "-o", "json", *place).out)["set_aside"] == []

    # Nothing that the new timeline acknowledged is missing, nor what the old one shares with it; on each replica.
    shared = {at: text for at, text in before.items() if at[1] <= marks[at[0]]}
    assert shared
    assert after
    for partition in PARTITIONS:
        expected = {id_: text for (number, id_), text in {**shared, **after}.items() if number == partition}
        told = waltzctl("txn", "get", str(partition), f"0-{max(expected)}", "-o", "json", *place)
        assert told.code == 0, told.err
        found = dict(enumerate(json.loads(line)["payload"] for line in told.out.splitlines()))
        assert {id_: found[id_] for id_ in expected} == expected
        compared = waltzctl("partition", "compare", str(partition), *place)
        assert compared.code == 0, compared.out
    assert cluster.stop() == []
    assert waltzctl("verify-segments", *data.values()).code == 0


def levels(waltzctl: Tool, cluster: LocalCluster) -> list[int]:
    """How many members of each partition count; 0 where one is a learner."""
    told = json.loads(waltzctl("partition", "list", "-o", "json", "--directory", cluster.directory).out)
    return [row["level"] if not any("*" in name for name in row["replicas"]) else 0 for row in told["partitions"]]
