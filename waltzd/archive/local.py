"""A directory as an object store: a second disk, or a network file system.

An object is written and flushed under a hidden name and then linked to its own name, which fails if that name exists: of
two writers one succeeds, and a crash leaves at most a hidden file. An object is replaced under a lock, by a rename.
Directories are flushed before a call returns, also if the object existed before."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from waltzd.archive.store import Listed, is_object_name
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ObjectAbsent, ObjectExists, StoreRefused, StoreUnavailable

_HIDDEN = ".new"
"""Directory of objects that are being written, and of the lock. No object name begins with a dot."""
_LOCK = "lock"
LEFT_SECONDS = 86_400.0
"""Age at which a hidden file is a leftover of a killed writer: far more than a write may take."""
_REFUSED = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTSUP, errno.ENAMETOOLONG,
}  # fmt: skip


class LocalStore:
    """Object store in the directory `root`, which must exist: a disk that is not mounted must not look like an empty
    store."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    @property
    def place(self) -> str:
        return str(self._root)

    def put_new(self, name: str, data: Buffer) -> str:
        path = self._path(name)
        with self._translated(name), self._written(name, data) as new:
            folders = [folder for folder in path.parents if folder.is_relative_to(self._root)]
            for folder in reversed(folders[:-1]):
                with suppress(FileExistsError):  # if it is a file, the next call fails
                    folder.mkdir(mode=0o750)
            try:
                os.link(new, path, follow_symlinks=False)
            finally:  # also if the object existed: its writer may have been killed before the flush
                for folder in folders:
                    _flush_folder(folder)
            return _tag(path.lstat())

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        path = self._path(name)
        with self._translated(name), self._written(name, data) as new, self._lock():
            if _tag(path.lstat()) != tag:
                raise ObjectExists(f"{name} in {self.place} was changed by another writer")
            os.rename(new, path)
            _flush_folder(path.parent)
            return _tag(path.lstat())

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        with self._translated(name):
            # Not blocking: another program could have put a pipe in its place, and a read of it would never end.
            fd = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._check_plain(name, os.fstat(fd))
                pieces = []
                while size > 0 and (piece := os.pread(fd, size, offset)):
                    pieces.append(piece)
                    offset += len(piece)
                    size -= len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            finally:
                os.close(fd)

    def list(self, folder: str) -> list[Listed]:
        with self._translated(folder or "the list of objects"):
            self._check_root()
            return sorted(self._below(self._path(folder) if folder else self._root, f"{folder}/" if folder else ""))

    def _below(self, path: Path, prefix: str) -> Iterator[Listed]:
        try:
            entries = list(os.scandir(path))
        except FileNotFoundError:
            return
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from self._below(path / entry.name, f"{name}/")
            elif entry.is_file(follow_symlinks=False) and is_object_name(name):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield Listed(name, found.st_size, _tag(found))

    def head(self, name: str) -> Listed:
        with self._translated(name):
            found = self._path(name).lstat()
        self._check_plain(name, found)
        return Listed(name, found.st_size, _tag(found))

    def _check_plain(self, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise StoreRefused(f"{name} in {self.place} is not a plain file")

    def remove(self, name: str) -> None:
        path = self._path(name)
        with self._translated(name), suppress(ObjectAbsent), self._translated(name):
            path.unlink()
            _flush_folder(path.parent)

    def leftovers(self, now: float) -> Sequence[Listed]:
        """Return the hidden files that killed writers left a day ago or earlier. `now`: a Unix time. The names of the files
        are not object names."""
        with self._translated(_HIDDEN):
            self._check_root()
            try:
                entries = list(os.scandir(self._root / _HIDDEN))
            except FileNotFoundError:
                return []
            found = []
            for entry in entries:
                with suppress(FileNotFoundError):
                    said = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(said.st_mode) and entry.name != _LOCK and said.st_mtime < now - LEFT_SECONDS:
                        found.append(Listed(f"{_HIDDEN}/{entry.name}", said.st_size, _tag(said)))
            return sorted(found)

    def remove_leftover(self, one: Listed) -> None:
        """Remove a hidden file. If its writer is still alive after all, its call fails and is retried."""
        with self._translated(one.name), suppress(FileNotFoundError):
            (self._root / one.name).unlink()

    # -- the files

    def _path(self, name: str) -> Path:
        assert is_object_name(name), name
        return self._root / name

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise StoreRefused(
                f"there is no directory {self.place}",
                next_step="mount the disk or make the directory, so that the daemon's user may write there",
            )

    @contextmanager
    def _written(self, name: str, data: Buffer) -> Iterator[Path]:
        """Write and flush a hidden file with `data`, and yield its path. It is removed at the end unless it was renamed."""
        self._check_root()
        hidden = self._root / _HIDDEN
        hidden.mkdir(mode=0o750, exist_ok=True)
        path = hidden / f"{name.replace('/', '+')[-120:]}.{uuid.uuid4()}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            try:
                left = memoryview(data).cast("B")
                while left:
                    left = left[os.write(fd, left) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            with suppress(OSError):
                path.unlink()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fd = os.open(self._root / _HIDDEN / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise ObjectExists(f"{what} is in {self.place} already") from error
        except FileNotFoundError as error:
            self._check_root()
            raise ObjectAbsent(f"{what} is not in {self.place}") from error
        except OSError as error:
            said = f"{self.place}: {what}: {os.strerror(error.errno or 0)}"
            raise (StoreRefused if error.errno in _REFUSED else StoreUnavailable)(said) from error


def _tag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
