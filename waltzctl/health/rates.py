"""Rates of a cluster between two snapshots. No I/O.

Counters restart at 0 when a partition changes its owner or a process restarts. A counter that is smaller than before
has restarted, and its whole value is new. If the owner of a partition did not answer in one of the snapshots, its rates
are unknown, not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, PartitionView, StorageView
from waltzd.protocol.histogram import Histogram


@dataclass(frozen=True, kw_only=True)
class PartitionRates:
    partition: int | None
    """Number of the partition; None for the sum over all."""
    owner: str | None
    tx: float | None = None
    """Committed transactions per second; None if unknown."""
    bytes: float | None = None
    """Bytes of committed records per second; None if unknown."""
    refused: float | None = None
    """Share of refused transactions among all decided ones; None if none was decided."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    fed: float | None = None
    lag: int | None = None
    """Ids by which the slowest counted replica is behind; None if unknown."""
    mounts: int | None = None
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class StorageRates:
    name: str
    flushes: float | None = None
    flush_ms: float | None = None
    flush_p99_ms: float | None = None
    records: float | None = None
    bytes: float | None = None
    queued_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rates:
    seconds: float
    total: PartitionRates
    partitions: tuple[PartitionRates, ...]
    storages: tuple[StorageRates, ...]


def rates(before: ClusterSnapshot, now: ClusterSnapshot, seconds: float) -> Rates:
    """Compute the rates between two snapshots that are `seconds` apart."""
    assert seconds > 0
    earlier = {view.partition: view for view in before.partitions}
    pairs = [(earlier.get(view.partition), view) for view in now.partitions]
    stores = {view.meta.name: view for view in before.storages}
    return Rates(
        seconds=seconds,
        total=_total(pairs, seconds),
        partitions=tuple(_partition(then, view, seconds) for then, view in pairs),
        storages=tuple(_storage(stores.get(view.meta.name), view, seconds) for view in now.storages),
    )


SORTS: dict[str, Callable[[PartitionRates], float]] = {
    "partition": lambda found: float(found.partition or 0),
    "tx": lambda found: -(found.tx or 0.0),
    "bytes": lambda found: -(found.bytes or 0.0),
    "p99": lambda found: -(found.p99_ms or 0.0),
    "refused": lambda found: -(found.refused or 0.0),
    "lag": lambda found: -(found.lag or 0),
    "mounts": lambda found: -(found.mounts or 0),
}


def by(sort: str, found: Iterable[PartitionRates]) -> list[PartitionRates]:
    """Sort by the column; ties are ordered by number."""
    return sorted(found, key=lambda one: (SORTS[sort](one), one.partition or 0))


@dataclass(frozen=True, kw_only=True)
class _Change:
    """Compute the rates of one partition, or the sum over several."""

    committed: int = 0
    bytes: int = 0
    refused: int = 0
    fed: int = 0
    commit: Histogram = field(default_factory=Histogram)

    def plus(self, other: _Change) -> _Change:
        return _Change(
            committed=self.committed + other.committed,
            bytes=self.bytes + other.bytes,
            refused=self.refused + other.refused,
            fed=self.fed + other.fed,
            commit=self.commit.plus(other.commit),
        )


def _since(then: int, now: int) -> int:
    return now - then if now >= then else now


def _change(before: PartitionView | None, now: PartitionView) -> _Change | None:
    if before is None or before.reported is None or now.reported is None:
        return None
    then, found = before.reported.statistics, now.reported.statistics
    return _Change(
        committed=_since(then.committed, found.committed),
        bytes=_since(then.committed_bytes, found.committed_bytes),
        refused=_since(sum(then.refused.values()), sum(found.refused.values())),
        fed=_since(then.fed, found.fed),
        commit=found.commit.minus(then.commit),
    )


def _rated(
    partition: int | None, owner: str | None, change: _Change | None, seconds: float, views: Sequence[PartitionView]
) -> PartitionRates:
    reported = [view.reported for view in views if view.reported is not None]
    lags = [owned.committed - replica.durable_id for owned in reported for replica in owned.replicas if replica.counts]
    state = views[0].state if len(views) == 1 else ""
    decided = 0 if change is None else change.committed + change.refused
    return PartitionRates(
        partition=partition,
        owner=owner,
        tx=None if change is None else change.committed / seconds,
        bytes=None if change is None else change.bytes / seconds,
        refused=None if change is None or not decided else change.refused / decided,
        p50_ms=None if change is None else _ms(change.commit.quantile(0.5)),
        p99_ms=None if change is None else _ms(change.commit.quantile(0.99)),
        fed=None if change is None else change.fed / seconds,
        lag=max(0, *lags) if lags else None,
        mounts=sum(owned.mounts for owned in reported) if reported else None,
        state=state,
    )


def _partition(before: PartitionView | None, now: PartitionView, seconds: float) -> PartitionRates:
    return _rated(now.partition, now.owner, _change(before, now), seconds, [now])


def _total(pairs: Sequence[tuple[PartitionView | None, PartitionView]], seconds: float) -> PartitionRates:
    changes = [change for before, now in pairs if (change := _change(before, now)) is not None]
    whole = _Change() if changes else None
    for change in changes:
        assert whole is not None
        whole = whole.plus(change)
    return _rated(None, None, whole, seconds, [now for _, now in pairs])


def _storage(before: StorageView | None, now: StorageView, seconds: float) -> StorageRates:
    name, reported = now.meta.name, now.reported
    if reported is None:
        return StorageRates(name=name)
    queued, free = sum(held.queued_bytes for held in reported.assigned), reported.free_bytes
    if before is None or before.reported is None:
        return StorageRates(name=name, queued_bytes=queued, free_bytes=free)
    then, found = before.reported.statistics, reported.statistics
    flush = found.flush.minus(then.flush)
    return StorageRates(
        name=name,
        flushes=_since(then.groups, found.groups) / seconds,
        flush_ms=_ms(flush.mean),
        flush_p99_ms=_ms(flush.quantile(0.99)),
        records=_since(then.appended_records, found.appended_records) / seconds,
        bytes=_since(then.appended_bytes, found.appended_bytes) / seconds,
        queued_bytes=queued,
        free_bytes=free,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
