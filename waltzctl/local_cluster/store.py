"""The store to which a cluster on this machine archives its log: chosen once, looked at before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID

from waltzctl.shell.blueprint import ARCHIVE_KEY, write_whole
from waltzd.archive.listing import label_at
from waltzd.archive.location import directory_of, open_store
from waltzd.archive.signature import new_key
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, ForeignArchive, StoreRefused, StoreUnavailable

SEGMENT_BYTES = 1 << 20
"""Only what is in a full segment is archived: somebody who tries it out sees that after 1 MiB."""
NOTHING_STARTED = "nothing was started"


def settings_of(store: str, directory: Path) -> dict[str, object]:
    """For the configuration of each daemon of the cluster in this directory: storages upload, and servers give readers what
    has left the storages. An archive that was begun without a key has none. How large a segment is says the server in
    format 1, and in format 0 the storage."""
    key = key_file(directory)
    signed = {"archive_key": key} if key.exists() else {}
    return {"archive": store, "segment_bytes_max": SEGMENT_BYTES, **signed}


def key_file(directory: Path) -> Path:
    return directory.absolute() / ARCHIVE_KEY


def same_store(text: str, before: str | None, directory: Path) -> str | None:
    """What is still to be done: nothing where the cluster in this directory has that store already."""
    place = directory_of(text) or text
    if before is None:
        return place
    if place != before:
        raise BadArgument(
            f"--archive {text}: the cluster in {directory} archives to {before}",
            not_done=NOTHING_STARTED,
            next_step="leave the option out to continue with that archive, or name another directory",
        )
    return None


def store_for(text: str, key: UUID | None, directory: Path) -> str:
    """The store as the settings of daemons name it, once it is known to be one for the cluster with this key in this
    directory: None for one that is not made yet. A directory is made. Later it is not: one that is not there then was lost.
    An archive that is begun gets a key, beside the cluster and not in the store."""
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
    if there is None and not key_file(directory).exists():
        write_whole(key_file(directory), new_key(), 0o600)
    if there is not None and there.cluster != key:
        raise ForeignArchive(
            f"{place} holds the archive of the cluster {there.cluster}",
            not_done=NOTHING_STARTED,
            next_step="name another directory, or another folder of the bucket: each cluster has an archive of its own",
        )
    return place
