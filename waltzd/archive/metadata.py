"""The documents of a cluster in its archive: a numbered object for each change, made where none of that number was.

Each is the text of `waltzctl cluster save-metadata`, which proves itself, so `load-metadata` reads it as it is. This room
only knows bytes: what they say is `waltzd.cluster.metadata`.
"""

from __future__ import annotations

import re

from waltzd.archive.store import Listed, Store, read_object
from waltzd.errors import ObjectAbsent, ObjectExists

FOLDER = "metadata"
METADATA_BYTES_MAX = 64 << 20
_NAME = re.compile(rf"{FOLDER}/([0-9]{{10}})\.json")


def metadata_name(number: int) -> str:
    return f"{FOLDER}/{number:010d}.json"


def number_of(name: str) -> int | None:
    """None where the name is of no such object."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def metadata_in(store: Store) -> list[Listed]:
    """All that are listed, the oldest first."""
    return [one for one in store.list(FOLDER) if number_of(one.name) is not None]


def metadata_at(store: Store, number: int) -> bytes:
    return read_object(store, metadata_name(number), METADATA_BYTES_MAX)


def newest_metadata(store: Store) -> tuple[int, bytes] | None:
    """With its number. A list may lag, so the names behind it are tried. None where there is none."""
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
    """The number under which it is there. The same text is not written a second time behind itself."""
    number, newest = newest_metadata(store) or (0, b"")
    if newest == text:
        return number
    while True:
        number += 1
        try:
            store.put_new(metadata_name(number), text)
        except ObjectExists:  # of another writer, or of this one when an answer was lost
            if metadata_at(store, number) != text:
                continue
        return number
