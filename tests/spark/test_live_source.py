"""Spark on a real cluster: a table of what is committed, and a stream that goes on through the end of a storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.spark.test_spark_page import PAGE, programs
from tests.spark.test_stream import Sink
from waltzctl.local_cluster.local import ROOT, LocalCluster
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzd import BlockingClient, FeedMode, append_lock

PARTITIONS = 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster.make(tmp_path / "c", partitions=PARTITIONS, servers=2)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def servers(cluster: LocalCluster) -> tuple[str, ...]:
    return tuple(cluster.blueprint.addresses(name)[0] for name in cluster.blueprint.server_names)


def append(cluster: LocalCluster, partition: int, payloads: Sequence[bytes]) -> None:
    with BlockingClient(servers(cluster), feed=FeedMode.NONE, partitions=[partition]) as client:
        client.append_many(list(payloads), partition=partition)


def test_a_table_and_a_stream_of_a_cluster(spark: Any, cluster: LocalCluster, tmp_path: Path) -> None:
    log: dict[int, list[bytes]] = {partition: [] for partition in range(PARTITIONS)}

    def grow(count: int) -> list[tuple[int, int, bytes]]:
        for partition, payloads in log.items():
            more = [b"%d/%d" % (partition, len(payloads) + number) for number in range(count)]
            append(cluster, partition, more)
            payloads += more
        return sorted((each, id_, payload) for each, payloads in log.items() for id_, payload in enumerate(payloads))

    place = {"coordinator": cluster.blueprint.addresses(ZOOKEEPER)[0], "root": ROOT}
    everything = grow(500)
    rows = spark.read.format("waltz").options(**place).load().collect()
    assert sorted((row.partition, row.txid, bytes(row.data)) for row in rows) == everything
    (program,) = (each for each in programs() if "coordinator" in each)
    names = {"spark": spark}
    exec(compile(program.replace("127.0.0.1:55181", place["coordinator"]), str(PAGE), "exec"), names)
    assert names["log"].count() == len(everything)
    by_servers = spark.read.format("waltz").option("bootstrap.servers", ",".join(servers(cluster))).load()
    assert by_servers.where("partition = 1").count() == 500

    with BlockingClient(servers(cluster), feed=FeedMode.NONE, partitions=[1]) as client:
        client.append(b"marked", partition=1, locks=[append_lock("account", 17)])
    log[1].append(b"marked")
    marking = {**place, "lock": "account:17"}
    everything, marked = grow(200), [(1, 500, b"marked")]
    rows = spark.read.format("waltz").options(**marking).load().collect()
    assert [(row.partition, row.txid, bytes(row.data)) for row in rows] == marked
    narrow = Sink()
    frame = spark.readStream.format("waltz").options(**marking, maxTxnsPerTrigger="600").load()
    query = (
        frame.writeStream.foreachBatch(narrow).option("checkpointLocation", str(tmp_path / "marked"))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    assert narrow.rows == marked
    assert len(narrow.batches) > 3, "most batches have no task"

    sink = Sink()
    frame = spark.readStream.format("waltz").options(**place, maxTxnsPerTrigger="600").load()
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
        assert sink.rows == everything
        cluster.daemons[cluster.blueprint.storage_names[0]].kill()
        everything = grow(200)
        query.processAllAvailable()
        assert sink.rows == everything
        assert max(len(batch) for batch in sink.batches.values()) <= 600
    finally:
        query.stop()
