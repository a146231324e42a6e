"""Lists what an archive holds: its label, the newest manifest of each partition, and the segments that manifests name.

Readers use only the store, without a cluster, so the manifest with the highest number counts. Damage raises an error,
because a reader that fell back to an older manifest would silently return fewer records. `waltzd.archive.verification`
reads the same objects, and continues after damage.

Metadata of the cluster is kept beside the segments: one numbered object for each change, never overwritten.

Each object is the output of `waltzctl cluster save-metadata`, which carries its own digest and which `load-metadata` reads.
Here it is bytes; `waltzd.cluster.metadata` defines the content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from waltzd.archive.manifest import LABEL, MANIFEST_BYTES_MAX, Entry, Label, Manifest, folder_of
from waltzd.archive.store import Listed, Store, read_object
from waltzd.archive.upload import PartitionArchive
from waltzd.errors.operations import ArchiveDamaged, ForeignArchive, ObjectAbsent, ObjectExists
from waltzd.protocol.timelines import FIRST

TIMELINE = r"(?:timeline/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/)?"
"""Pattern of the folder of a later timeline in an object name; the first timeline has no such folder."""
_MANIFEST = re.compile(rf"partition-(0|[1-9][0-9]{{0,4}})/{TIMELINE}(?:manifest/([0-9]{{10}})|begin)\.json")
_LATER = re.compile(rf"partition-(0|[1-9][0-9]{{0,4}})/{TIMELINE.removesuffix('?')}(?:tail\.json|tail/[0-9]{{1,3}})")
"""Objects that are written only after `begin.json` of their timeline."""
CALLS_MAX = 16
"""Number of objects that are fetched at once. Each is a few KiB, so the latency of the store decides."""


def label_at(store: Store) -> Label | None:
    """Return the label of the archive in a store; None if there is no archive."""
    try:
        text = read_object(store, LABEL, MANIFEST_BYTES_MAX)
    except ObjectAbsent:
        return None
    return Label.decode(text, f"{store.place}: {LABEL}")


def label_of(store: Store, *, not_done: str) -> Label:
    """Return the label of the archive in a store; raise `ForeignArchive` if there is no archive."""
    found = label_at(store)
    if found is None:
        raise ForeignArchive(
            f"{store.place} holds no archive: there is no {LABEL}",
            not_done=not_done,
            next_step="name the store as the storages do, in `archive` of their configuration",
        )
    return found


ONE_LOG = "find out which of the two is the log of the cluster, and move the folder of the other out of the store"
Branch = tuple[int, UUID]
"""A partition, and one of its timelines."""


def highest_numbers(listed: Iterable[Listed]) -> dict[Branch, int]:
    """Return the highest manifest number of each timeline of each partition; 0 for a later timeline without a numbered
    manifest, even if its `begin.json` is lost."""
    found: dict[Branch, int] = {}
    for one in listed:
        if match := _MANIFEST.fullmatch(one.name):
            branch, number = branch_of(match), int(match[3] or 0)
            found[branch] = max(number, found.get(branch, 0))
        elif match := _LATER.fullmatch(one.name):
            found.setdefault(branch_of(match), 0)
    return found


def branch_of(match: re.Match[str]) -> Branch:
    """Return the partition and the timeline in the first two groups of a matched name."""
    return int(match[1]), FIRST if match[2] is None else UUID(match[2])


def is_manifest(name: str) -> bool:
    return _MANIFEST.fullmatch(name) is not None


def branches_in(store: Store, label: Label, partitions: Collection[int] | None = None) -> list[Manifest]:
    """Return the newest manifest of each timeline of these partitions, or of all; the current timeline comes last. A
    timeline without a numbered manifest has that of `begin.json`. A list may lag, so higher numbers are tried by name."""
    folders = [""]
    if partitions is not None:  # not its segments and chunks, which may be many
        folders = [f"{folder_of(number)}/{kind}" for number in sorted(set(partitions)) for kind in ("manifest", "timeline")]
    numbers = highest_numbers(one for folder in folders for one in store.list(folder))
    with ThreadPoolExecutor(CALLS_MAX) as pool:
        found = pool.map(lambda each: _last(PartitionArchive(store, label, *each[0]), each[1]), sorted(numbers.items()))
        branches = sorted(found, key=rank)
    check_one_log(branches, store)
    return branches


def rank(manifest: Manifest) -> tuple[int, int, int]:
    """Return a sort key: partition, then number of the timeline, then the session in which the timeline began."""
    later = manifest.lineage.later
    return manifest.partition, manifest.lineage.number, later[-1].session if later else 0


def contradictions(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, str]]:
    """Yield each timeline that the newest timeline of its partition does not continue, and the error message. `manifests`
    are in the order of `rank`.

    Each new timeline is added to all known ones, so such an object came from another copy of the archive, or two clusters
    with one key wrote to the store."""
    newest = {one.partition: one.lineage for one in manifests}
    for one in manifests:
        after = newest[one.partition]
        if not after.continues(one.lineage):
            named = f"timeline {after.number}, {folder_of(one.partition, after.current)}, does not continue it"
            yield one, f"is timeline {one.lineage.number} of another log: {named}"


def check_one_log(manifests: Sequence[Manifest], store: Store) -> None:
    """Raise `ArchiveDamaged` if the timelines of a partition are of two logs. `manifests`: in the order of `rank`."""
    for one, detail in contradictions(manifests):
        raise ArchiveDamaged(f"{store.place}: {folder_of(one.partition, one.timeline)} {detail}", next_step=ONE_LOG)


def newest_manifests(store: Store, label: Label, partitions: Collection[int] | None = None) -> dict[int, Manifest]:
    """Return the newest manifest of the current timeline, for these partitions, or for all in the archive."""
    return {one.partition: one for one in branches_in(store, label, partitions)}


def _last(archive: PartitionArchive, number: int) -> Manifest:
    found = archive.start() if number == 0 else archive.manifest_at(number)
    if found is None:
        raise ArchiveDamaged(f"{archive.name_at(number)} was listed, and is not in the store")
    while (following := archive.manifest_at(found.number + 1)) is not None:
        found = following
    return found


def all_pieces(archive: PartitionArchive, manifest: Manifest) -> list[Entry]:
    """Return all segments below a manifest, in order of ids. Chunks are fetched concurrently."""
    entries = list(manifest.entries)
    with ThreadPoolExecutor(CALLS_MAX) as pool:
        while any(entry.level for entry in entries):
            entries = [piece for part in pool.map(lambda entry: _below(archive, entry), entries) for piece in part]
    return entries


def _below(archive: PartitionArchive, entry: Entry) -> tuple[Entry, ...]:
    if entry.level == 0:
        return (entry,)
    try:
        return archive.chunk(entry).entries
    except ObjectAbsent as error:
        where = f"{entry.name(archive.partition)}, ids {entry.first} to {entry.last} of partition {archive.partition}"
        raise ArchiveDamaged(
            f"{where}: it is not in the store, and no other object names the segments of these ids"
        ) from error


METADATA_FOLDER = "metadata"
METADATA_BYTES_MAX = 64 << 20
_NAME = re.compile(rf"{METADATA_FOLDER}/([0-9]{{10}})\.json")


def metadata_name(number: int) -> str:
    return f"{METADATA_FOLDER}/{number:010d}.json"


def number_of(name: str) -> int | None:
    """Return the number in the name of a metadata object; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def metadata_in(store: Store) -> list[Listed]:
    """Return the listed metadata objects, the oldest first."""
    return [one for one in store.list(METADATA_FOLDER) if number_of(one.name) is not None]


def metadata_at(store: Store, number: int) -> bytes:
    return read_object(store, metadata_name(number), METADATA_BYTES_MAX)


def newest_metadata(store: Store) -> tuple[int, bytes] | None:
    """Return the newest metadata with its number; None without any. A list may lag, so higher numbers are tried by name."""
    listed = metadata_in(store)
    number = number_of(listed[-1].name) or 0 if listed else 0
    found = (number, metadata_at(store, number)) if number else None
    while True:
        number += 1
        try:
            found = number, metadata_at(store, number)
        except ObjectAbsent:
            return found


def save_metadata(store: Store, text: bytes) -> int:
    """Save metadata under the next number, and return that number. Text equal to the newest object is not written again."""
    number, newest = newest_metadata(store) or (0, b"")
    if newest == text:
        return number
    while True:
        number += 1
        try:
            store.put_new(metadata_name(number), text)
        except ObjectExists:  # another writer was faster, or an earlier call of ours took effect without an answer
            if metadata_at(store, number) != text:
                continue
        return number
