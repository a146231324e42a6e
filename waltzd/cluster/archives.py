"""How far the archive of each partition reaches, as the coordinator keeps it: the last step of each upload.

What stands here is in the store, proven and read back. A document only goes forward: the next one has a higher manifest or
a higher floor, and of two owners that write at once its version refuses one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from waltzd.cluster.cluster import ARCHIVES, NO_VERSION, ROOT, put
from waltzd.cluster.coordinator import Change, Coordinator, Create, Set
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta, decode_root
from waltzd.errors import BadMetadata, ChangedMeanwhile
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.document import decode, encode
from waltzd.protocol.timelines import Lineage


def archive_path(partition: int) -> str:
    return f"{ARCHIVES}/{partition}"


async def archived(coordinator: Coordinator, partition: int) -> tuple[ArchiveMeta | None, int]:
    """With its version; None where nothing of this partition is archived."""
    path = archive_path(partition)
    node = await coordinator.get(path)
    return (None, NO_VERSION) if node is None else (decode(ArchiveMeta, node.data, path), node.version)


async def all_archived(coordinator: Coordinator) -> Mapping[int, ArchiveMeta]:
    names = [name for name in await coordinator.children(ARCHIVES) if name.isdecimal()]
    found = {int(name): (await archived(coordinator, int(name)))[0] for name in names}
    return {partition: meta for partition, meta in sorted(found.items()) if meta is not None}


def said(meta: ArchiveMeta) -> Archived:
    return Archived(
        archive=meta.archive, number=meta.number, sha256=meta.sha256, last_id=meta.last, timeline=meta.timeline
    )  # fmt: skip


def shared_with(meta: ArchiveMeta | None, lineage: Lineage) -> Archived | None:
    """How far the archive of which the document speaks is one of the log of this lineage: all of it where both are of one
    timeline, else up to the fork. None where it has nothing of the log. For reading and comparing; what counts as archived
    is what the current timeline names: `of_timeline`."""
    if meta is None or meta.timeline not in lineage:
        return None
    shared = lineage.shared_to(meta.timeline)
    last_id = meta.last if shared is None else min(meta.last, shared)
    if last_id < 0:
        return None
    return replace(said(meta), last_id=last_id)


def of_timeline(meta: ArchiveMeta | None, lineage: Lineage) -> ArchiveMeta | None:
    """The document, where it is of the current timeline of the log."""
    return meta if meta is not None and meta.timeline == lineage.current else None


def _goes_on(meta: ArchiveMeta, before: ArchiveMeta) -> bool:
    """More is archived, or the same by the same manifest with a higher floor; or another timeline begins."""
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
    """The version that it has now. `before`: what stands there, at that version."""
    if before is not None and not _goes_on(meta, before):
        raise BadMetadata(
            f"the archive of partition {partition} reaches to id {before.last} by the manifest {before.number} of "
            f"{before.archive}, with the floor {before.floor}; it does not go back to id {meta.last} by the manifest "
            f"{meta.number} of {meta.archive}, with the floor {meta.floor}"
        )
    folder: list[Change] = []
    if version == NO_VERSION and await coordinator.get(ARCHIVES) is None:  # a cluster of an older version has none
        folder = [Create(ARCHIVES, b"")]
    try:
        await coordinator.commit([*folder, put(archive_path(partition), encode(meta), version)])
    except ChangedMeanwhile:
        found, newest = await archived(coordinator, partition)
        if found == meta:  # our own, whose answer was lost
            return newest
        raise
    return version + 1


async def save_keep_local(coordinator: Coordinator, keep_local: str, *, before: ClusterMeta) -> None:
    """What storages keep of the archived log, if the cluster's document is still what it was."""
    node = await coordinator.get(ROOT)
    if node is None or decode_root(node.data) != before:
        raise ChangedMeanwhile("the document of the cluster was changed by somebody else meanwhile")
    await coordinator.commit([Set(ROOT, encode(replace(before, keep_local=keep_local)), node.version)])
