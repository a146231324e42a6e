"""The store to which a local cluster archives its log: chosen once, and checked before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

from waltzctl.shell.blueprint import ARCHIVE_KEY, write_whole
from waltzd.archive.listing import label_at
from waltzd.archive.location import directory_of, open_store
from waltzd.archive.signature import new_key
from waltzd.disk.real import translate
from waltzd.errors.operations import ForeignArchive, StoreRefused, StoreUnavailable

SEGMENT_BYTES = 1 << 20
"""Segment size of a cluster with an archive: only full segments are archived, so a trial sees its first one after 1
MiB."""
NOTHING_STARTED = "nothing was started"


def settings_of(store: str, directory: Path) -> dict[str, object]:
    """Return the archive settings of a daemon: storages upload, and servers read for clients what storages no longer
    hold. An archive without a key is not signed. Both kinds of daemon get the segment size, because servers decide it
    in format 1 and storages in format 0."""
    key = key_file(directory)
    signed = {"archive_key": key} if key.exists() else {}
    return {"archive": store, "segment_bytes_max": SEGMENT_BYTES, **signed}


def key_file(directory: Path) -> Path:
    return directory.absolute() / ARCHIVE_KEY


def store_for(text: str, directory: Path) -> str:
    """Return the store of a new cluster in the form that settings use, after checking that it is empty. A directory is
    made now, and never later, because a missing one was lost then. The archive gets a signing key, which stays outside
    of the store."""
    folder = directory_of(text)
    if folder is not None:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate(error, f"making the directory {folder}") from error
    place = folder or text
    try:
        there = label_at(open_store(place))
    except (StoreRefused, StoreUnavailable) as error:
        raise type(error)(
            error.message, not_done=NOTHING_STARTED,
            next_step="check the address of the store and your credentials; a bucket has to be there",
        ) from error  # fmt: skip
    if there is not None:
        raise ForeignArchive(
            f"{place} holds the archive of the cluster {there.cluster}",
            not_done=NOTHING_STARTED,
            next_step="name another directory, or another folder of the bucket: each cluster has an archive of its own",
        )
    if not key_file(directory).exists():
        write_whole(key_file(directory), new_key(), 0o600)
    return place
