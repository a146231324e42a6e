"""What a storage says of itself: of its partitions, and whether it is ready. It asks the file system: on a thread."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from uuid import UUID

from waltzd.daemon import alarm, readiness
from waltzd.daemon.alarm import Trouble
from waltzd.disk.seam import Disk
from waltzd.errors import PartitionDamaged
from waltzd.protocol.descriptions import PartitionDescription, Statistics, StorageDescription
from waltzd.storage.lane import Lane
from waltzd.storage.replica.directory import Directory, PartitionLine


def describe(
    disk: Disk,
    directory: Directory,
    lanes: Mapping[int, Lane],
    *,
    instance: UUID,
    free_bytes_min: int,
    uptime_ms: int,
    is_draining: bool,
    statistics: Statistics,
) -> StorageDescription:
    header = directory.control.header
    return StorageDescription(
        cluster_key=header.key,
        partitions=header.partitions,
        directory=directory.path,
        version=version("waltz"),
        free_bytes=disk.free_bytes(directory.path),
        uptime_ms=uptime_ms,
        is_draining=is_draining,
        assigned=tuple(_describe(disk, line, lanes.get(line.partition)) for line in directory.lines()),
        statistics=statistics,
        instance=instance,
        free_bytes_min=free_bytes_min,
        name=directory.name,
        set_aside=directory.aside(),
    )


def _describe(disk: Disk, line: PartitionLine, lane: Lane | None) -> PartitionDescription:
    number, refused = line.partition, line.error
    if refused is not None or lane is None:
        story = f"partition {number}: refused, {refused.message}" if refused else f"partition {number}: being changed"
        return PartitionDescription(
            partition=number, status=None, refused=refused, story=story, queued_bytes=0, disk_bytes=0
        )
    return PartitionDescription(
        partition=number,
        status=lane.partition.status(),
        refused=None,
        story=lane.partition.describe(),
        queued_bytes=lane.queued_bytes,
        disk_bytes=sum(e.size for e in disk.list(lane.partition.directory) if not e.is_directory),
    )


def unready(disk: Disk, directory: Directory, *, free_bytes_min: int, is_draining: bool) -> list[str]:
    return readiness.of_storage(
        is_draining=is_draining,
        free_bytes=disk.free_bytes(directory.path),
        free_bytes_min=free_bytes_min,
        full=[partition.number for partition in directory.partitions() if partition.status().is_full],
        refused={line.partition: line.error.message for line in directory.lines() if line.error is not None},
    )


def troubles(directory: Directory) -> dict[int, list[Trouble]]:
    """What is wrong with replicas, by partition."""
    found: dict[int, list[Trouble]] = {
        line.partition: alarm.of_replica(damage=None, refused=line.error.message, code=line.error.code)
        for line in directory.lines()
        if line.error is not None
    }
    for partition in directory.partitions():
        findings = partition.findings
        if findings:
            found[partition.number] = alarm.of_replica(
                damage=findings[0].sentence(), refused=None, code=PartitionDamaged.code
            )
    return found
