"""What a benchmark found, with all that a reader needs to judge it. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from waltzctl.bench.counters import PERCENTILES, Latencies, Window
from waltzctl.bench.machine import Disk, Machine


@dataclass(frozen=True, kw_only=True)
class Place:
    """The cluster that was measured."""

    cluster: str
    version: str
    partitions: int
    storages: int
    servers: int
    replicas: int | None
    """None for a cluster of another machine: its applications do not see that."""
    disk: Disk | None
    round_trip_seconds: float | None
    """Of a call to a server that does next to nothing: the median of some, before the run."""

    @property
    def durability(self) -> str:
        if self.replicas is None:
            return "flushed by a majority of its replicas before each acknowledgement"
        needed = self.replicas // 2 + 1
        return f"{self.replicas} replicas, flushed by {needed} of them before each acknowledgement"


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    name: str
    cpu_share: float
    """Of one core, over what was measured."""
    memory_bytes: int
    transaction_cpu_seconds: float | None = None
    """For each committed transaction; None where none was counted."""


@dataclass(frozen=True, kw_only=True)
class StorageUse:
    name: str
    flushes_per_second: float
    records_per_flush: float
    flush_seconds: float
    """From the write to the end of the flush, the mean."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One kind of thing that was measured, and how long each took."""

    name: str
    count: int
    seconds: float
    bytes: int
    latencies: Mapping[float, float] = field(default_factory=dict)
    """Seconds, by percentile."""
    highest: float = 0.0

    @property
    def rate(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e6 if self.seconds else 0.0

    @classmethod
    def of(cls, name: str, latencies: Latencies, seconds: float, size: int) -> Series:
        return cls(
            name=name,
            count=latencies.count,
            seconds=seconds,
            bytes=latencies.count * size,
            latencies=latencies.percentiles(PERCENTILES),
            highest=latencies.highest,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "count": self.count,
            "seconds": round(self.seconds, 3),
            "bytes": self.bytes,
            "per_second": round(self.rate, 1),
            "megabytes_per_second": round(self.megabytes_per_second, 1),
            "latency_ms": {f"p{percent:g}": round(1000 * value, 3) for percent, value in self.latencies.items()}
            | ({"max": round(1000 * self.highest, 3)} if self.latencies else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    bench: str
    settings: Mapping[str, Any]
    machine: Machine
    place: Place
    series: tuple[Series, ...]
    refused: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    unknown: int = 0
    attempts: int = 0
    processes: tuple[ProcessUse, ...] = ()
    storages: tuple[StorageUse, ...] = ()
    windows: tuple[Window, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know before believing a figure."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "place": asdict(self.place) | {"durability": self.place.durability},
            "series": [series.as_dict() for series in self.series],
        }
