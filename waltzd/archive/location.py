"""Locations of stores: the path of a directory, or the URL of a bucket."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlparse

from waltzd.archive.signature import SignedStore, key_of_environment, read_key
from waltzd.archive.store import Store
from waltzd.errors import BadArgument

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")


def directory_of(text: str) -> str | None:
    """Return the directory that a location names, or None for a bucket; raise `BadArgument` if it names neither."""
    if "://" not in text:
        return os.path.abspath(text)
    url = urlparse(text)
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return unquote(url.path)
    if url.scheme not in SCHEMES or not url.netloc:
        raise BadArgument(
            f"{text} names no store",
            next_step=f"name a directory, or a bucket with {', '.join(f'{scheme}://' for scheme in SCHEMES)}",
        )
    return None


def open_archive(text: str) -> SignedStore:
    """Return a store for a command, with the key that the environment names. The store is not contacted yet."""
    return SignedStore(_store(text), key_of_environment())


def open_store(text: str, key_file: str | None = None, *, accepts_unsigned: bool = False) -> SignedStore:
    """Return a store for a daemon, with the key in `key_file`. The store is not contacted yet. Raise `BadConfig` for a bad
    key."""
    return SignedStore(_store(text), None if key_file is None else read_key(key_file), accepts_unsigned=accepts_unsigned)


def _store(text: str) -> Store:
    directory = directory_of(text)
    if directory is not None:
        from waltzd.archive.local import LocalStore  # imported late: it needs POSIX, and settings are read on all platforms

        return LocalStore(directory)
    from waltzd.archive.objects import ObjectStore  # obstore comes with an extra

    return ObjectStore.at(text)
