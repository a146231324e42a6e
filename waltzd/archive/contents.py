"""What there is to read in an archive: its label, the newest manifest of each partition, and the pieces that these name.

A reader has no cluster to ask, so it goes by the store alone: the highest number counts. Damage is an error here, because
a reader that took an older manifest instead would give fewer records and not know it. `waltzd.archive.verification` asks
the same of a store, and goes on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from waltzd.archive.archiving import PartitionArchive
from waltzd.archive.manifest import LABEL, MANIFEST_BYTES_MAX, Entry, Label, Manifest, folder_of
from waltzd.archive.store import Listed, Store, read_object
from waltzd.errors import ForeignArchive, ObjectAbsent

_MANIFEST = re.compile(r"partition-(0|[1-9][0-9]{0,4})/manifest/([0-9]{10})\.json")
CALLS_MAX = 16
"""Objects that are fetched at once: each is a few KiB, and what takes time is the way to the store."""


def label_at(store: Store) -> Label | None:
    """None where there is no archive."""
    try:
        text = read_object(store, LABEL, MANIFEST_BYTES_MAX)
    except ObjectAbsent:
        return None
    return Label.decode(text, f"{store.place}: {LABEL}")


def label_of(store: Store, *, not_done: str) -> Label:
    """`ForeignArchive` where there is no archive."""
    found = label_at(store)
    if found is None:
        raise ForeignArchive(
            f"{store.place} holds no archive: there is no {LABEL}",
            not_done=not_done,
            next_step="name the store as the storages do, in `archive` of their configuration",
        )
    return found


def highest_numbers(listed: Iterable[Listed]) -> dict[int, int]:
    """By partition, the highest number of a manifest among these objects."""
    found: dict[int, int] = {}
    for one in listed:
        if match := _MANIFEST.fullmatch(one.name):
            partition, number = int(match[1]), int(match[2])
            found[partition] = max(number, found.get(partition, 0))
    return found


def is_manifest(name: str) -> bool:
    return _MANIFEST.fullmatch(name) is not None


def newest_manifests(store: Store, label: Label, partitions: Collection[int] | None = None) -> dict[int, Manifest]:
    """Of these partitions, as far as they are in the archive, or of all. A list may lag, so the numbers behind the highest
    one are asked for by name."""
    folders = [""] if partitions is None else [f"{folder_of(number)}/manifest" for number in sorted(set(partitions))]
    numbers = highest_numbers(one for folder in folders for one in store.list(folder))
    with ThreadPoolExecutor(CALLS_MAX) as pool:
        found = pool.map(lambda each: _last(PartitionArchive(store, label, each[0]), each[1]), sorted(numbers.items()))
        return {manifest.partition: manifest for manifest in found}


def _last(archive: PartitionArchive, number: int) -> Manifest:
    found = archive.manifest_at(number)
    if found is None:
        raise ObjectAbsent(f"{archive.name_at(number)} was listed, and is not in the store")
    while (following := archive.manifest_at(found.number + 1)) is not None:
        found = following
    return found


def all_pieces(archive: PartitionArchive, manifest: Manifest) -> list[Entry]:
    """In order of ids. Chunks are fetched many at a time."""
    entries = list(manifest.entries)
    with ThreadPoolExecutor(CALLS_MAX) as pool:
        while any(entry.level for entry in entries):
            entries = [piece for part in pool.map(lambda entry: _below(archive, entry), entries) for piece in part]
    return entries


def _below(archive: PartitionArchive, entry: Entry) -> tuple[Entry, ...]:
    return (entry,) if entry.level == 0 else archive.chunk(entry).entries
