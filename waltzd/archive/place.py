"""Which store a text names: a directory of this machine, or the address of a bucket."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlparse

from waltzd.archive.local import LocalStore
from waltzd.archive.store import Store
from waltzd.errors import BadArgument

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")


def open_store(text: str) -> Store:
    """Nothing is asked of the store yet."""
    if "://" not in text:
        return LocalStore(os.path.abspath(text))
    url = urlparse(text)
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return LocalStore(unquote(url.path))
    if url.scheme not in SCHEMES or not url.netloc:
        raise BadArgument(
            f"{text} names no store",
            next_step=f"name a directory, or a bucket with {', '.join(f'{scheme}://' for scheme in SCHEMES)}",
        )
    from waltzd.archive.objects import ObjectStore  # obstore comes with an extra

    return ObjectStore.at(text)
