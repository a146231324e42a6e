"""The file system of this machine, with the interface of `waltzd.disk.seam`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from waltzd.disk.seam import Buffer, Entry, Inode
from waltzd.errors import WaltzError
from waltzd.errors.operations import (
    DirectoryHeld,
    DiskFull,
    FlushFailed,
    NoPermission,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    TooManyFiles,
)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_IOV_MAX = 1024
_HEADER_LOCK_BYTES = 128
_FLOCK = struct.Struct("hhqqi4x")
"""Layout of `struct flock` of 64-bit Linux: type, whence, start, length, pid."""
_FS_IOC_GETVERSION = 0x80087601
"""Request for the generation of an inode, which ext4, xfs, btrfs and f2fs have."""
_STATX_BYTES, _STATX_BTIME, _BIRTH_OFFSET, _AT_EMPTY_PATH = 256, 0x800, 0x50, 0x1000


def translate(error: OSError, what: str) -> WaltzError:
    """Return the `WaltzError` for an error of the operating system."""
    number = error.errno or 0
    name = errno.errorcode.get(number, "?")
    said = f"{what}: {os.strerror(number)} ({name})"
    facts = {"errno": name}
    if number in _NO_SPACE:
        return DiskFull(said, **facts)
    if number in _DENIED:
        return NoPermission(said, **facts)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return PathMissing(said, **facts)
    if number in (errno.ELOOP, errno.EISDIR):
        return NotRegularFile(said, next_step="give the path of a plain file or directory", **facts)
    if number in (errno.EAGAIN, errno.EWOULDBLOCK):
        return DirectoryHeld(said, **facts)
    kind = TooManyFiles if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else ReadFailed
    return kind(said, **facts)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise translate(error, what) from error


def _birth_ns(fd: int) -> int:
    """Return the birth time of a file in nanoseconds, which never changes; 0 if the file system does not store it."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, answer):
        return 0
    is_known = struct.unpack_from("I", answer)[0] & _STATX_BTIME
    seconds, nanoseconds = struct.unpack_from("qI", answer, _BIRTH_OFFSET)
    return int(seconds * 1_000_000_000 + nanoseconds) if is_known else 0


class RealFile:
    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def path(self) -> str:
        return self._path

    @property
    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def inode(self) -> Inode:
        try:
            generation = struct.unpack_from("I", fcntl.ioctl(self._fd, _FS_IOC_GETVERSION, bytes(8)))[0]
        except OSError:  # this file system has no generations
            generation = _birth_ns(self._fd)
        return Inode(os.fstat(self._fd).st_ino, generation)

    def read(self, offset: int, size: int) -> bytes:
        pieces: list[bytes] = []
        while size > 0:
            try:
                piece = os.pread(self._fd, size, offset)
            except OSError as error:
                raise translate(error, f"reading {self._path} at {offset}") from error
            if not piece:
                break
            if len(piece) == size and not pieces:
                return piece
            pieces.append(piece)
            offset += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise translate(error, f"reading {self._path} at {offset + done}") from error
            if count == 0:
                break
            done += count
        return done

    def write(self, offset: int, data: Buffer) -> None:
        self.write_many(offset, [data])

    def write_many(self, offset: int, pieces: Sequence[Buffer]) -> None:
        at = 0
        while at < len(pieces):
            batch = list(pieces[at : at + _IOV_MAX])
            at += len(batch)
            while batch:
                try:
                    count = os.pwritev(self._fd, batch, offset)
                except OSError as error:
                    raise self._write_error(error, offset) from error
                if count == 0 and any(len(piece) for piece in batch):
                    raise FlushFailed(f"writing {self._path} at {offset}: no byte was written, and no error was returned")
                offset += count
                while batch and count >= len(batch[0]):
                    count -= len(batch.pop(0))
                if batch and count:
                    batch[0] = memoryview(batch[0])[count:]

    def _write_error(self, error: OSError, offset: int) -> WaltzError:
        if error.errno in _NO_SPACE:
            return translate(error, f"writing {self._path} at {offset}")
        return self._fatal(error, f"writing {self._path} at {offset}")

    def _fatal(self, error: OSError, what: str) -> FlushFailed:
        name = errno.errorcode.get(error.errno or 0, "?")
        device = os.fstat(self._fd).st_dev
        where = f"device {os.major(device)}:{os.minor(device)}"
        return FlushFailed(f"{what}: {os.strerror(error.errno or 0)} ({name}) on {where}", errno=name, device=where)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._write_error(error, size) from error

    def flush(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self._fatal(error, f"flushing {self._path}") from error

    def lock(self) -> None:
        """Lock with fcntl over the control header, as the original Waltz does, and with flock, which also excludes a second
        opening in this process."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _HEADER_LOCK_BYTES, 0)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK):
                raise DirectoryHeld(f"{os.path.dirname(self._path)} is held by another process") from error
            raise translate(error, f"locking {self._path}") from error

    def is_locked_elsewhere(self) -> bool:
        """Query the lock without taking it: a lock even for a moment could keep a starting daemon out."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _HEADER_LOCK_BYTES, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question))
        return bool(answer[0] != fcntl.F_UNLCK)

    def __del__(self) -> None:
        # A sealed segment leaves the cache of open files while a reader may still use it: its last user closes it.
        if self._fd >= 0:
            os.close(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:  # the system reports a lost write here at the latest
                raise FlushFailed(f"closing {self._path}: {os.strerror(error.errno or 0)}") from error


class RealDisk:
    def open(self, path: str, *, write: bool = False) -> RealFile:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return self._open(path, flags)

    def create(self, path: str) -> RealFile:
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def _open(self, path: str, flags: int) -> RealFile:
        with _translated(f"opening {path}"):
            fd = os.open(path, flags, 0o640)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotRegularFile(f"{path} is not a plain file")
        return RealFile(path, fd)

    def exists(self, path: str) -> bool:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise translate(error, f"examining {path}") from error
        return True

    def size(self, path: str) -> int:
        with _translated(f"examining {path}"):
            return os.lstat(path).st_size

    def inode(self, path: str) -> Inode:
        with closing(self.open(path)) as file:
            return file.inode()

    def list(self, path: str) -> list[Entry]:
        out: list[Entry] = []
        with _translated(f"listing {path}"), os.scandir(path) as found:
            for item in found:
                is_directory = item.is_dir(follow_symlinks=False)
                with suppress(FileNotFoundError):  # a daemon renamed or removed it meanwhile
                    size = 0 if is_directory else item.stat(follow_symlinks=False).st_size
                    out.append(Entry(item.name, is_directory, size))
        return sorted(out, key=lambda entry: entry.name)

    def names(self, path: str) -> Sequence[str]:
        with _translated(f"listing {path}"):
            return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        with _translated(f"creating the directory {path}"):
            os.mkdir(path, 0o750)

    def rename(self, old: str, new: str) -> None:
        with _translated(f"renaming {old} to {new}"):
            os.rename(old, new)

    def remove(self, path: str) -> None:
        with _translated(f"removing {path}"):
            os.unlink(path)

    def remove_directory(self, path: str) -> None:
        with _translated(f"removing the directory {path}"):
            os.rmdir(path)

    def flush_directory(self, path: str) -> None:
        with _translated(f"opening the directory {path}"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise FlushFailed(f"flushing the directory {path}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        with _translated(f"examining the file system of {path}"):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def fresh_id(self) -> uuid.UUID:
        return uuid.uuid4()

    def boot_id(self) -> uuid.UUID:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return uuid.UUID(file.read().strip())
        except (OSError, ValueError):
            return uuid.UUID(int=0)


class GuestDisk(RealDisk):
    """Disk of tools that create files in the directory of a daemon. A file created by root gets the owner of its directory,
    so that the daemon, which runs as another user, can open it."""

    def create(self, path: str) -> RealFile:
        file = super().create(path)
        try:
            self._give(path, file.fileno)
        except WaltzError:
            file.close()
            raise
        return file

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        with _translated(f"opening the directory {path}"):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._give(path, fd)
        finally:
            os.close(fd)

    @staticmethod
    def _give(path: str, fd: int) -> None:
        """Change the owner through the open file, because its name could point to another file by now."""
        if os.geteuid() != 0:
            return
        with _translated(f"giving {path} to the owner of its directory"):
            home, found = os.stat(os.path.dirname(path) or "."), os.fstat(fd)
            is_elsewhere = (
                stat.S_ISREG(found.st_mode) and found.st_nlink > 1
            )  # it may have a name outside of this directory
            if (found.st_uid, found.st_gid) != (home.st_uid, home.st_gid) and not is_elsewhere:
                os.fchown(fd, home.st_uid, home.st_gid)
