"""Which store a text names: a directory of this machine, or the address of a bucket."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlparse

from waltzd.archive.store import Store
from waltzd.errors import BadArgument

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")


def check_place(text: str) -> str | None:
    """The directory that it names, or None for a bucket; `BadArgument` where it is neither."""
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


def open_store(text: str) -> Store:
    """Nothing is asked of the store yet."""
    directory = check_place(text)
    if directory is not None:
        from waltzd.archive.local import LocalStore  # POSIX only, and a storage within a test reads settings anywhere

        return LocalStore(directory)
    from waltzd.archive.objects import ObjectStore  # obstore comes with an extra

    return ObjectStore.at(text)
