"""From paths that were typed to the things that they name: storage directories, partition directories, segments.

Paths become absolute, so that the same thing named twice is seen to be the same. Links are refused where they would be
followed at the end of a path, because they can make one set of bytes look like two.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from waltzd.disk.real import translate
from waltzd.errors import BadArgument, NothingHere, NotRegularFile
from waltzd.format.layout import CONTROL_NAME, IDENTITY_NAME, PROMISE_NAME, first_id_of
from waltzd.storage.offline.verify import Target, partition_of


def resolve(paths: Iterable[str]) -> list[Target]:
    return [_resolve_one(path) for path in paths]


def plain_file(path: str) -> str:
    """The absolute path of something that is a plain file."""
    mode = _mode_of(path)
    if stat.S_ISDIR(mode):
        raise BadArgument(f"{path} is a directory", not_done="nothing was read", next_step="give one file in it")
    _refuse_special(path, mode)
    return _absolute(path)


def _mode_of(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise translate(error, f"looking at {path}") from error
        raise BadArgument(f"{path!r} is no path") from error


def _refuse_special(path: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise NotRegularFile(f"{path} is a link", next_step=f"give the real path: {os.path.realpath(path)}")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise NotRegularFile(
            f"{path} is neither a file nor a directory", next_step="give a storage directory, or a file in it"
        )


def _absolute(path: str) -> str:
    return os.path.realpath(path)


def _resolve_one(path: str) -> Target:
    mode = _mode_of(path)
    _refuse_special(path, mode)
    whole = _absolute(path)
    if stat.S_ISREG(mode):
        directory, _, name = whole.rpartition("/")
        first_id = first_id_of(name)
        if first_id is None:
            raise BadArgument(
                f"{path} is not named like a segment or an index",
                not_done="nothing was read or changed",
                next_step="give a storage directory, a partition directory, or a file such as 0000000000000000000.seg",
            )
        return Target(storage=_storage_of(directory), directory=directory, first_id=first_id)
    names = _names(whole)
    if _is_storage(whole, names):
        return Target(storage=whole)
    if any(first_id_of(name) is not None for name in names) or PROMISE_NAME in names:
        return Target(storage=_storage_of(whole), directory=whole)
    raise NothingHere(
        f"{path} holds no Waltz data: no control file, no partition, no segment"
        if names
        else f"{path} is an empty directory"
    )


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise translate(error, f"listing {directory}") from error


def _is_storage(directory: str, names: list[str]) -> bool:
    """A storage that has lost its control file still has partitions."""
    if CONTROL_NAME in names or IDENTITY_NAME in names:
        return True
    for name in names:
        inner = f"{directory}/{name}"
        if partition_of(name) is None or os.path.islink(inner) or not os.path.isdir(inner):
            continue
        if any(first_id_of(inside) is not None for inside in _names(inner)):
            return True
    return False


def _storage_of(directory: str) -> str:
    """The storage directory around a partition directory; "" for one that stands alone."""
    parent, _, name = directory.rpartition("/")
    names = _names(parent or "/")
    is_storage = partition_of(name) is not None and (CONTROL_NAME in names or IDENTITY_NAME in names)
    return parent if is_storage else ""
