"""The metrics of a daemon, for Prometheus.

There are no counters here: every page is made from the values that `Describe` also returns, by functions from values to
metric families. So the two never disagree, and hot code does not depend on metrics. Units are base units, and counters end
in `_total`. docs/metrics.md lists all names with their meaning, which a test compares with this module.

The counters of a partition restart at zero on each new owner; `rate()` handles that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from waltzd.archive.reader import ReadCounters
from waltzd.protocol.descriptions import (
    OwnedPartition,
    OwnedReplica,
    PartitionDescription,
    PartitionStatistics,
    ServerDescription,
    StorageDescription,
)
from waltzd.protocol.groups import GroupTotals
from waltzd.protocol.histogram import BOUNDS, Histogram
from waltzd.protocol.locks import Reason
from waltzd.protocol.quorum import majority

Families: TypeAlias = Iterable[Metric]
_BOUNDS = (*map(floatToGoString, BOUNDS), "+Inf")


def _family(kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, about: str, labels: Sequence[str],
            values: Iterable[tuple[Sequence[str], float]]) -> Metric:  # fmt: skip
    family = kind(name, about, labels=labels)
    for words, value in values:
        family.add_metric(words, value)
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return _family(GaugeMetricFamily, name, about, (), [((), value)])


def _certificate(role: str, seconds_left: float | None) -> Iterator[Metric]:
    """Yield the time until the certificate ends; nothing without a certificate, because any number would be an end."""
    if seconds_left is not None:
        about = "Seconds until its certificate ends; negative: it is over."
        yield _gauge(f"waltz_{role}_certificate_seconds", about, seconds_left)


def _histogram(name: str, about: str, found: Histogram) -> Metric:
    rising = zip(_BOUNDS, map(float, accumulate(found.counts)), strict=True)
    return HistogramMetricFamily(name, about, buckets=list(rising), sum_value=found.seconds)


# -- a server ----------------------------------------------------------------------------------------------------------


def of_server(
    found: ServerDescription,
    *,
    cluster_partitions: int,
    unready: Sequence[str],
    commit: Histogram,
    certificate_seconds: float | None,
    archive: ReadCounters | None,
) -> Iterator[Metric]:
    """Yield the metrics of a server. `commit`: latencies of all partitions that this process has owned; `archive`: None if
    the server does not read from an archive."""
    yield InfoMetricFamily(
        "waltz_server",
        "Which server this is.",
        value={
            "name": found.name,
            "cluster_key": str(found.cluster_key),
            "process": str(found.instance),
            "version": found.version,
        },
    )
    yield _gauge("waltz_server_uptime_seconds", "Seconds since this process started.", found.uptime_ms / 1000)
    yield _gauge("waltz_server_ready", "1 when /readyz says so.", not unready)
    yield from _certificate("server", certificate_seconds)
    yield _gauge("waltz_server_coordinator_connected", "1 while ZooKeeper answers.", found.is_connected)
    yield _gauge("waltz_server_draining", "1 while it gives its partitions away.", found.is_draining)
    yield _gauge("waltz_server_leader", "1 on the server that decides who owns what.", found.is_leader)
    if found.metadata_backup is not None:
        about = "On the leader: since the documents of the cluster were last seen in the archive as they are; -1: never."
        age = found.metadata_backup.age_ms
        yield _gauge("waltz_server_metadata_backup_age", about, age / 1000 if age >= 0 else -1)
    about = "Processes of applications that are connected."
    yield _gauge("waltz_server_client_instances", about, found.clients.instances)
    for name, about, value in (
        ("slowed_seconds", "How long applications waited because of their quotas.", found.clients.slowed_ms / 1000),
        ("refused_mounts", "Mounts that were refused to a name because it had its quota or share.",
         found.clients.refused_mounts),
    ):  # fmt: skip
        yield _family(CounterMetricFamily, f"waltz_server_{name}", about, (), [((), float(value))])
    if found.groups is not None:
        for name, about, number_of in _OF_GROUPS:
            yield _gauge(f"waltz_server_{name}", about, number_of(found.groups))
    yield _gauge("waltz_server_partitions", "Partitions that it owns, open or not.", len(found.partitions))
    yield _gauge(
        "waltz_server_cluster_partitions",
        "Partitions of the whole cluster, and the group log where there is one.",
        cluster_partitions,
    )
    yield _histogram(
        "waltz_server_commit_seconds",
        "From the arrival of a batch to the outcome, of each committed transaction, over all partitions.",
        commit,
    )
    if archive is not None:
        yield from _archive_reads(archive)
    for name, about, value_of in _OF_PARTITION:
        values = (((str(owned.partition),), float(value_of(owned))) for owned in found.partitions)
        yield _family(GaugeMetricFamily, f"waltz_server_partition_{name}", about, ("partition",), values)
    for name, about, count_of in _COUNTED:
        values = (((str(owned.partition),), float(count_of(owned.statistics))) for owned in found.partitions)
        yield _family(CounterMetricFamily, f"waltz_server_{name}", about, ("partition",), values)
    yield _family(
        CounterMetricFamily,
        "waltz_server_refused_transactions",
        "Transactions that were refused because of locks, by reason.",
        ("partition", "reason"),
        (
            ((str(owned.partition), reason.name), owned.statistics.refused.get(reason.name, 0))
            for owned in found.partitions
            for reason in Reason
            if reason is not Reason.NOT_IN_LOG  # that is what clients find out by themselves
        ),
    )
    for name, about, seen in _OF_REPLICA:
        labels = ("partition", "storage", "role")
        pairs = [(owned, replica) for owned in found.partitions for replica in owned.replicas]
        rows = (((str(o.partition), r.storage, r.role), float(seen(o, r))) for o, r in pairs)
        yield _family(GaugeMetricFamily, f"waltz_server_replica_{name}", about, labels, rows)
    yield _family(
        GaugeMetricFamily,
        "waltz_server_replica_state",
        "1 for the state in which the owner sees the replica.",
        ("partition", "storage", "state"),
        (((str(o.partition), r.storage, r.state), 1.0) for o in found.partitions for r in o.replicas),
    )


def _archive_reads(found: ReadCounters) -> Iterator[Metric]:
    for name, about, value in (
        ("archive_fetched_bytes", "Bytes of archived segments that were fetched from the store.", found.fetched_bytes),
        ("archive_cache_hits", "Reads of archived segments that were in the cache.", found.hits),
        ("archive_cache_misses", "Reads of archived segments that had to be fetched.", found.misses),
        ("archive_read_failures", "Reads from the archive that failed or have to wait.", found.failures),
        ("archive_key_index_faults", "Look-ups that read a segment, as its key index was lost.", found.key_faults),
    ):
        yield _family(CounterMetricFamily, f"waltz_server_{name}", about, (), [((), float(value))])
    yield _gauge("waltz_server_archive_cache_bytes", "Archived segments in the cache.", found.cached_bytes)


def members(owned: OwnedPartition) -> list[OwnedReplica]:
    """Return the replicas that are members; commits need a majority of them."""
    return [replica for replica in owned.replicas if replica.role == "member"]


def counting(owned: OwnedPartition) -> int:
    """Return the number of members whose acknowledgements count now."""
    return sum(replica.counts for replica in members(owned))


def margin(owned: OwnedPartition) -> int:
    """Return how many more members may fail before appends stop; below 0, appends have stopped."""
    count = len(members(owned))
    return counting(owned) - majority(count) if count else 0


def archived_id(owned: OwnedPartition) -> int:
    return -1 if owned.archived is None else owned.archived.last_id


_OF_PARTITION: tuple[tuple[str, str, Callable[[OwnedPartition], float]], ...] = (
    ("open", "1 when it takes transactions.", lambda owned: owned.step == "OPEN"),
    ("generation", "How often its ownership has moved.", lambda owned: owned.generation),
    ("session", "The session of its owner; 0 while there is none.", lambda owned: owned.session),
    ("high_water_mark", "The highest committed id; -1 for none.", lambda owned: owned.committed),
    ("last_id", "The highest id that was given out; -1 for none.", lambda owned: owned.last_id),
    ("mounts", "Clients that have it mounted.", lambda owned: owned.mounts),
    ("tail_bytes", "Bytes of the newest transactions, which are kept in memory.", lambda owned: owned.tail_bytes),
    ("members", "Replicas of which a majority decides.", lambda owned: len(members(owned))),
    ("members_counting", "Members that make transactions committed now.", counting),
    ("margin", "Members that may still fail before nothing can be written; negative: nothing can be written.", margin),
    ("archived_id", "The highest id that is archived; -1 for none.", archived_id),
    ("archive_stopped", "1 while its archive does not go on.", lambda owned: bool(owned.archive_trouble)),
    ("archive_incomplete", "1 while its archive lacks what was in it.", lambda owned: bool(owned.lost_object)),
    (
        "backup_lag_seconds",
        "For how long something that is committed is not backed up; 0 when all is.",
        lambda owned: owned.backup_lag_ms / 1000,
    ),
    ("backup_lag_transactions", "Committed transactions that are not backed up.", lambda owned: owned.lost_now),
)
_OF_GROUPS: tuple[tuple[str, str, Callable[[GroupTotals], float]], ...] = (
    ("groups", "Consumer groups of the whole cluster. Only where there is a group log, as the next nine.",
     lambda found: found.groups),
    ("groups_behind", "1 while it may not know the newest of groups, as the group log is away or damaged.",
     lambda found: bool(found.trouble)),
    ("groups_stopped", "Groups that have stopped, once for each partition that it owns.", lambda found: found.stopped),
    ("groups_paused", "Groups that give nothing out for a while, once for each partition that it owns.",
     lambda found: found.paused),
    ("groups_unattended", "Groups that have something to do and no member, once for each partition that it owns.",
     lambda found: found.unattended),
    ("group_members", "Members of groups in the partitions that it owns.", lambda found: found.members),
    ("group_in_flight", "Transactions that members of groups have in their hands.", lambda found: found.in_flight),
    ("group_lag", "Transactions that are committed and that groups have not done.", lambda found: found.lag),
    ("group_parked", "Transactions that groups have put aside.", lambda found: found.parked),
    ("group_log_foreign_entries", "Entries of the group log that no server wrote; they are passed over.",
     lambda found: found.foreign),
)  # fmt: skip
_COUNTED: tuple[tuple[str, str, Callable[[PartitionStatistics], float]], ...] = (
    ("attempted_transactions", "Transactions that clients wanted to append.", lambda done: done.attempts),
    (
        "committed_transactions",
        "Transactions whose clients were told that they are committed.",
        lambda done: done.committed,
    ),
    ("committed_bytes", "Bytes of the records of committed transactions.", lambda done: done.committed_bytes),
    ("fed_transactions", "Transactions that were sent to mounts, once for each.", lambda done: done.fed),
    ("fed_bytes", "Bytes that were sent to mounts.", lambda done: done.fed_bytes),
)


def _lag(owned: OwnedPartition, replica: OwnedReplica) -> int:
    return max(0, owned.committed - replica.durable_id)


_OF_REPLICA: tuple[tuple[str, str, Callable[[OwnedPartition, OwnedReplica], float]], ...] = (
    ("lag_transactions", "Committed transactions that it does not have on disk, as far as the owner knows.", _lag),
    ("counts", "1 when its acknowledgements make transactions committed.", lambda owned, replica: replica.counts),
)


# -- a storage ---------------------------------------------------------------------------------------------------------


def of_storage(
    found: StorageDescription, *, unready: Sequence[str], free_bytes_min: int, certificate_seconds: float | None
) -> Iterator[Metric]:
    done = found.statistics
    yield InfoMetricFamily(
        "waltz_storage",
        "Which storage this is.",
        value={"cluster_key": str(found.cluster_key), "directory": found.directory, "version": found.version},
    )
    yield _gauge("waltz_storage_uptime_seconds", "Seconds since this process started.", found.uptime_ms / 1000)
    yield _gauge("waltz_storage_ready", "1 when /readyz says so.", not unready)
    yield from _certificate("storage", certificate_seconds)
    yield _gauge("waltz_storage_draining", "1 while it shuts down.", found.is_draining)
    yield _gauge("waltz_storage_free_bytes", "Free bytes on the file system of its directory.", found.free_bytes)
    yield _gauge("waltz_storage_free_bytes_min", "With less than this free, appends are refused.", free_bytes_min)
    yield _gauge(
        "waltz_storage_replicas", "Partitions that have a replica here, refused ones included.", len(found.assigned)
    )
    yield _histogram("waltz_storage_flush_seconds", "Writing and flushing a group of appends.", done.flush)
    for name, about, value in (
        ("appended_records", "Records that were written and flushed.", done.appended_records),
        ("appended_bytes", "Bytes of records that were written and flushed.", done.appended_bytes),
        ("read_records", "Records that were read for servers and tools.", done.read_records),
        ("read_bytes", "Bytes that were read for servers and tools, whole segments included.", done.read_bytes),
        ("checkpoints", "How often index files were flushed, and marked as sound.", done.checkpoints),
        ("refused_calls", "Calls and append streams that ended with an error.", done.refused_calls),
    ):
        yield _family(CounterMetricFamily, f"waltz_storage_{name}", about, (), [((), float(value))])
    if (scrub := found.scrub) is not None and scrub.period_seconds:
        about = "Sealed segments in which the scrub found something wrong, since the start."
        yield _family(
            CounterMetricFamily, "waltz_storage_scrub_damaged_segments", about, (), [((), float(scrub.damaged_segments))]
        )
        about = "Rate at which sealed segments are read to find rot."
        yield _gauge("waltz_storage_scrub_bytes_per_second", about, scrub.bytes_per_second)
        if scrub.age_ms is not None:
            about = "Seconds since the start of the last complete round of the scrub; absent before there is one."
            yield _gauge("waltz_storage_scrub_age_seconds", about, scrub.age_ms / 1000)
    for name, about, value_of in _OF_STORED:
        values = (((str(one.partition),), float(value_of(one))) for one in found.assigned)
        yield _family(GaugeMetricFamily, f"waltz_storage_replica_{name}", about, ("partition",), values)


def floor_of(one: PartitionDescription) -> int:
    return one.status.floor if one.status else 0


_OF_STORED: tuple[tuple[str, str, Callable[[PartitionDescription], float]], ...] = (
    ("refused", "1 when its files cannot be used: nothing of it is served.", lambda one: one.refused is not None),
    ("damaged", "1 when something of it is damaged.", lambda one: one.status is not None and not one.status.is_sound),
    ("available", "0 when an operator took it offline, or it is refused.", lambda one: _is(one, "is_available")),
    ("full", "1 while its appends wait for disk space.", lambda one: _is(one, "is_full")),
    ("last_id", "The highest id that it holds; -1 for none.", lambda one: one.status.last_id if one.status else -1),
    ("floor", "The first id that it has; below it the log is only in the archive.", floor_of),
    ("segments", "Segment files.", lambda one: one.status.segments if one.status else 0),
    ("disk_bytes", "Bytes of its files.", lambda one: one.disk_bytes),
    ("queue_bytes", "Bytes of appends that wait to be written.", lambda one: one.queued_bytes),
)


def _is(one: PartitionDescription, flag: str) -> bool:
    return one.status is not None and bool(getattr(one.status, flag))


def of_port(role: str, *, failed: int) -> Iterator[Metric]:
    about = "Pages of http_listen that could not be made because of a mistake in Waltz."
    yield _family(CounterMetricFamily, f"waltz_{role}_failed_pages", about, (), [((), float(failed))])


# -- the page ----------------------------------------------------------------------------------------------------------


class _Snapshot(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Families:
        return self._families


def _takes_openmetrics(accept: str) -> bool:
    """Return whether a header `Accept` names OpenMetrics; the rest of the header is ignored."""
    for one in accept.split(","):
        kind, *settings = (word.strip() for word in one.split(";"))
        versions = [word for word in settings if word.startswith("version=")]
        if kind == "application/openmetrics-text" and versions in ([], ["version=1.0.0"]):
            return True
    return False


def page(families: Families, accept: str = "") -> tuple[bytes, str]:
    """Return the page with these families and the standard process metrics, in the newest format that the caller accepts,
    and the content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(families))
    ProcessCollector(registry=registry)
    if _takes_openmetrics(accept):
        return openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
