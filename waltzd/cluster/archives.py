"""The document in ZooKeeper that records how far the archive of a partition reaches.

Writing this document is the last step of an upload: what it names is in the store, was read back and was verified. A
document only goes forward: the next version has a higher manifest number or a higher floor. When two owners write at the
same time, the compare-and-set on the version rejects one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from waltzd.cluster.cluster import ARCHIVES, NO_VERSION, put
from waltzd.cluster.coordinator import Change, Coordinator, Create
from waltzd.cluster.documents import ArchiveMeta
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.document import decode, encode
from waltzd.protocol.timelines import Lineage


def archive_path(partition: int) -> str:
    return f"{ARCHIVES}/{partition}"


async def archived(coordinator: Coordinator, partition: int) -> tuple[ArchiveMeta | None, int]:
    """Return the document and its version; None and `NO_VERSION` if nothing of the partition is archived."""
    path = archive_path(partition)
    node = await coordinator.get(path)
    return (None, NO_VERSION) if node is None else (decode(ArchiveMeta, node.data, path), node.version)


async def all_archived(coordinator: Coordinator) -> Mapping[int, ArchiveMeta]:
    names = [name for name in await coordinator.children(ARCHIVES) if name.isdecimal()]
    found = {int(name): (await archived(coordinator, int(name)))[0] for name in names}
    return {partition: meta for partition, meta in sorted(found.items()) if meta is not None}


def said(meta: ArchiveMeta) -> Archived:
    """Return the document in the form that owners and storages exchange."""
    return Archived(
        archive=meta.archive, number=meta.number, sha256=meta.sha256, last_id=meta.last, timeline=meta.timeline
    )  # fmt: skip


def shared_with(meta: ArchiveMeta | None, lineage: Lineage) -> Archived | None:
    """Return the part of the archive that belongs to the log of this lineage; None if no part does.

    That is all of it if the document names the current timeline, otherwise everything up to the fork. Use it for reading
    and comparing only: what counts as archived is what `of_timeline` returns."""
    if meta is None or meta.timeline not in lineage:
        return None
    shared = lineage.shared_to(meta.timeline)
    last_id = meta.last if shared is None else min(meta.last, shared)
    if last_id < 0:
        return None
    return replace(said(meta), last_id=last_id)


def of_timeline(meta: ArchiveMeta | None, lineage: Lineage) -> ArchiveMeta | None:
    """Return the document if it names the current timeline of the log, otherwise None."""
    return meta if meta is not None and meta.timeline == lineage.current else None


def _goes_on(meta: ArchiveMeta, before: ArchiveMeta) -> bool:
    """Return whether `meta` may replace `before`: more is archived, the floor rises, or another timeline begins."""
    if meta.timeline != before.timeline:
        return meta.archive == before.archive
    if meta.archive != before.archive or meta.floor < before.floor:
        return False
    if meta.number == before.number:
        return (meta.sha256, meta.last) == (before.sha256, before.last) and meta.floor > before.floor
    return meta.number > before.number and meta.last >= before.last


async def save_archived(
    coordinator: Coordinator, partition: int, meta: ArchiveMeta, before: ArchiveMeta | None, version: int
) -> int:
    """Write the document and return its new version. `before` is the document that was read at `version`."""
    if before is not None and not _goes_on(meta, before):
        raise BadMetadata(
            f"the archive of partition {partition} reaches to id {before.last} by the manifest {before.number} of "
            f"{before.archive}, with the floor {before.floor}; it does not go back to id {meta.last} by the manifest "
            f"{meta.number} of {meta.archive}, with the floor {meta.floor}"
        )
    folder: list[Change] = []
    if (
        version == NO_VERSION and await coordinator.get(ARCHIVES) is None
    ):  # a cluster of an older version has no such folder
        folder = [Create(ARCHIVES, b"")]
    try:
        await coordinator.commit([*folder, put(archive_path(partition), encode(meta), version)])
    except ChangedMeanwhile:
        found, newest = await archived(coordinator, partition)
        if found == meta:  # our own write, whose answer was lost
            return newest
        raise
    return version + 1
