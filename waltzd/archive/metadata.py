"""Cluster metadata in the archive: one numbered object for each change, never overwritten.

Each object is the output of `waltzctl cluster save-metadata`, which carries its own digest and which `load-metadata` reads.
Here it is bytes; `waltzd.cluster.metadata` defines the content.
"""

from __future__ import annotations

import re

from waltzd.archive.store import Listed, Store, read_object
from waltzd.errors.operations import ObjectAbsent, ObjectExists

FOLDER = "metadata"
METADATA_BYTES_MAX = 64 << 20
_NAME = re.compile(rf"{FOLDER}/([0-9]{{10}})\.json")


def metadata_name(number: int) -> str:
    return f"{FOLDER}/{number:010d}.json"


def number_of(name: str) -> int | None:
    """Return the number in the name of a metadata object; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def metadata_in(store: Store) -> list[Listed]:
    """Return the listed metadata objects, the oldest first."""
    return [one for one in store.list(FOLDER) if number_of(one.name) is not None]


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
