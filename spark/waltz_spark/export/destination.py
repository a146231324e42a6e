"""The destination of an export: a directory of this machine, or an object store or HDFS through PyArrow's file systems.

No named file of an export is ever overwritten. A file is written under a hidden name and then renamed, which fails if the
name is taken; so of two concurrent exporters that publish the same manifest, one fails. On a local file system this is an
atomic link, and a file is flushed before it is named. Not every object store has a conditional put: there, a name is
checked first, and a lease keeps a second exporter away.

A destination is a value that is pickled and sent to the tasks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from waltz_spark.export.manifest import HIDDEN, LOCK, MANIFESTS, UNFINISHED, Manifest, decode, manifest_path
from waltzd.archive.manifest import LABEL
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import (
    DiskFull,
    ExportDamaged,
    ExportHeld,
    NoPermission,
    NoSuchName,
    NotOurExport,
    PathMissing,
    StoreFailed,
)

_ALIASES = {"s3a": "s3", "s3n": "s3", "gs": "gs"}


READ_BYTES = 4 << 20
STEP_BYTES = 64 << 10
"""Bytes between two flushes; one large flush at the end would delay other writers of the disk."""


class Output(Protocol):
    """A file that is being written. After `close` without an error, it is complete, and on disk if it is local."""

    def write(self, data: Any, /) -> int | None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Output: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None: ...


class Hold(Protocol):
    """The exclusive right to write to the output."""

    def check(self) -> None:
        """Raise `ExportHeld` if the right may be lost."""
        ...


@dataclass(frozen=True)
class Destination:
    """A place for the files of an export, through a file system of PyArrow. Paths are relative to it, with slashes."""

    place: str
    """Address of the destination, for people and for other commands."""
    system: Any = None
    """File system to use in place of that of the URI, with `place` as a path in it."""
    is_on_this_machine = False

    def _there(self, path: str) -> tuple[Any, str]:
        """Return the file system, and the path in it."""
        if self.system is not None:
            return self.system, f"{self.place}/{path}".rstrip("/")
        try:
            system, root = fs.FileSystem.from_uri(self.place)
        except (ValueError, OSError, NotImplementedError) as error:
            raise BadArgument(
                f"{self.place} cannot be written to: {' '.join(str(error).split())}", not_done="nothing was written"
            ) from error
        return system, f"{root}/{path}".rstrip("/")

    @contextmanager
    def doing(self, what: str, path: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; errors say what failed, and where."""
        there = self._there(path)
        try:
            yield there
        except OSError as error:
            raise failure(error, f"{what} {self.place}/{path}") from error

    def _info(self, path: str) -> Any:
        with self.doing("looking at", path) as (system, there):
            return system.get_file_info(there)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with self.doing("reading", path) as (system, there), suppress(FileNotFoundError):
            return bytes(system.open_input_stream(there).readall())
        return None

    def names(self, path: str = "") -> list[str]:
        """Return the sorted names in a directory; empty if it does not exist."""
        with self.doing("reading the directory", path) as (system, there):
            return sorted(info.base_name for info in system.get_file_info(fs.FileSelector(there, allow_not_found=True)))

    def size(self, path: str) -> int | None:
        return cast(int | None, self._info(path).size)

    def _is_there(self, path: str) -> bool:
        return bool(self._info(path).type != fs.FileType.NotFound)

    def put_new(self, path: str, content: bytes) -> bool:
        """Write a small file; return False if the name is taken."""
        if self._is_there(path):
            return False
        self.put(path, content)
        return self.read(path) == content

    def put(self, path: str, content: bytes) -> None:
        with self.create(path) as file:
            file.write(content)

    def create(self, path: str, *, in_small_steps: bool = False) -> Output:
        """Create a file. `in_small_steps`: flush often, so that other writers of a disk do not wait long."""
        with self.doing("writing", path) as (system, there):
            system.create_dir(there.rpartition("/")[0], recursive=True)
            return cast(Output, system.open_output_stream(there))

    def move_new(self, old: str, new: str) -> bool:
        """Rename a file; return False if the new name is taken."""
        if self._is_there(new):
            return False
        with self.doing("naming", new) as (system, there):
            system.move(self._there(old)[1], there)
        return True

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        if self._is_there(path):
            with self.doing("removing", path) as (system, there):
                system.delete_file(there)

    def remove_tree(self, path: str) -> None:
        found = self._info(path)
        with self.doing("removing", path) as (system, there):
            if found.type == fs.FileType.Directory:
                system.delete_dir(there)
            elif found.type != fs.FileType.NotFound:
                system.delete_file(there)

    def open(self, path: str) -> pa.NativeFile:
        with self.doing("reading", path) as (system, there):
            return system.open_input_file(there)

    @contextmanager
    def hold(self, who: str) -> Iterator[Hold]:
        """Hold a lease: not every store refuses to write over a file, so a name is only looked for before it is taken."""
        lease = _Lease(self, who)
        lease.take()
        try:
            yield lease
        finally:
            lease.leave()


def destination_of(text: str) -> Destination:
    """Return the destination for a path or a URI: file:, s3:, gs:, hdfs:, abfs: and others of PyArrow."""
    found = urlparse(text)
    if len(found.scheme) < 2:  # none, or a drive
        return LocalDestination(str(Path(text).absolute()))
    if found.scheme == "file":
        if found.netloc not in ("", "localhost"):
            raise BadArgument(f"{text} is on another machine; a file: URI has three slashes, as in file:///data/export")
        return LocalDestination(unquote(found.path).rstrip("/") or "/")
    scheme = _ALIASES.get(found.scheme, found.scheme)
    return Destination(scheme + text[len(found.scheme) :].rstrip("/"))


_NEXT_STEPS: Mapping[type[WaltzError], str] = {
    DiskFull: "free space there, then run the same command again",
    NoPermission: "let the user that runs this read and write there, or name another output",
    PathMissing: "check the path of the output",
}


def failure(error: OSError, what: str) -> WaltzError:
    """Convert an error of a file system, with advice for exports in place of that for storages. Errors of stores have no
    number of the operating system."""
    if not error.errno:
        return StoreFailed(f"{what}: {' '.join(str(error).split())}")
    found = translate(error, what)
    return type(found)(
        found.message,
        not_done="the newest manifest counts as before, and nothing that this run has not published yet",
        next_step=_NEXT_STEPS.get(type(found), "look at the file system of the output, then run the same command again"),
        **found.facts,
    )


def measured(destination: Destination, path: str) -> tuple[int, str]:
    """Read a file; return its size and its SHA-256."""
    size, digest = 0, hashlib.sha256()
    with destination.open(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def encode_writer(run: str) -> str:
    return json.dumps({"run": run, "host": socket.gethostname(), "pid": os.getpid()})


def describe_writer(text: bytes | None) -> str:
    try:
        found = json.loads(text or b"")
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


# -- manifests -------------------------------------------------------------------------------------------------------


def newest_manifest(destination: Destination) -> Manifest | None:
    """Return the newest manifest; None if the destination is empty. Raise `NotOurExport` for other files."""
    names = destination.names(MANIFESTS)
    numbers = sorted(int(name[:8]) for name in names if len(name) == 13 and name[:8].isdecimal() and name.endswith(".json"))
    if not numbers:
        foreign = [name for name in destination.names() if name != HIDDEN]
        if foreign and HIDDEN not in destination.names():
            raise NotOurExport(
                f"{destination.place} exists and holds {foreign[0]}, but no export",
                next_step="name a new directory, or an empty one",
            )
        return None
    path = manifest_path(numbers[-1])
    text = destination.read(path)
    if text is None:  # another run published a newer one meanwhile, and removed this one
        return newest_manifest(destination)
    found = decode(text, f"{destination.place}/{path}")
    if found.number != numbers[-1]:
        raise ExportDamaged(f"{destination.place}/{path} says that it is number {found.number}")
    return found


def require_manifest(destination: Destination) -> Manifest:
    """Return the newest manifest; raise if there is no export."""
    if destination.size(LABEL) is not None:
        raise BadArgument(
            f"{destination.place} is an archive, not an export",
            not_done="nothing was checked",
            next_step=f"use `waltzctl archive verify {destination.place}`",
        )
    found = newest_manifest(destination)
    if found is None:
        raise NoSuchName(
            f"there is no export in {destination.place}",
            not_done="nothing was read",
            next_step="check the path; `waltzctl spark-export` makes one",
        )
    return found


# -- this machine ------------------------------------------------------------------------------------------------------


class LocalDestination(Destination):
    """A directory of this machine. Files are flushed, and named by links, which never take the place of another file."""

    is_on_this_machine = True

    def __init__(self, place: str) -> None:
        super().__init__(place, fs.LocalFileSystem())

    def __reduce__(self) -> tuple[type[LocalDestination], tuple[str]]:
        return LocalDestination, (self.place,)

    def _plain(self, path: str) -> str:
        """Return the path; raise if it is not a regular file, as a pipe, which would block a reader for ever."""
        if self._info(path).type not in (fs.FileType.File, fs.FileType.NotFound):
            raise ExportDamaged(f"{self.place}/{path} is not a plain file")
        return path

    def names(self, path: str = "") -> list[str]:
        with self.doing("reading the directory", path) as (_, there), suppress(FileNotFoundError):
            return sorted(os.listdir(there))  # PyArrow raises UnicodeDecodeError for a name that is not UTF-8
        return []

    def read(self, path: str) -> bytes | None:
        return super().read(self._plain(path))

    def open(self, path: str) -> pa.NativeFile:
        return super().open(self._plain(path))

    def put_new(self, path: str, content: bytes) -> bool:
        beside = f"{UNFINISHED}/{uuid.uuid4().hex}.new"
        self.put(beside, content)
        try:
            return self.move_new(beside, path)
        finally:
            self.remove(beside)

    def create(self, path: str, *, in_small_steps: bool = False) -> Output:
        with self.doing("writing", path) as (_, there):
            Path(there).parent.mkdir(parents=True, exist_ok=True)
            return _Flushed(Path(there), STEP_BYTES if in_small_steps else None)

    def move_new(self, old: str, new: str) -> bool:
        with self.doing("naming", new) as (_, there), suppress(FileExistsError):
            source, target = Path(self.place, old), Path(there)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)
            source.unlink()
            flush(target.parent)
            return True
        return False

    def remove_tree(self, path: str) -> None:
        if self._info(path).type == fs.FileType.Directory:
            shutil.rmtree(self._there(path)[1], ignore_errors=True)  # a task of a killed run may still write there
        else:
            self.remove(path)

    @contextmanager
    def hold(self, who: str) -> Iterator[Hold]:
        """Hold an flock, which the system releases when the process ends."""
        with self.doing("writing", LOCK) as (_, there):
            Path(there).parent.mkdir(parents=True, exist_ok=True)
            number = os.open(there, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ExportHeld(f"{describe_writer(self.read(LOCK))} is writing to {self.place}") from error
            with self.doing("writing", LOCK):
                os.ftruncate(number, 0)
                os.write(number, who.encode())
            yield _Certain()
        finally:
            os.close(number)


@contextmanager
def _doing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(error, what) from error


class _Certain:
    def check(self) -> None:
        """Do nothing: the operating system keeps the lock."""


class _Flushed:
    """A file that is flushed by `close`."""

    def __init__(self, path: Path, step_bytes: int | None = None) -> None:
        self._path = path
        self._step = step_bytes
        self._file = path.open("xb")

    def write(self, data: Any) -> int:
        with _doing(f"writing {self._path}"):
            return self._file.write(data) if self._step is None else self._write_in_steps(memoryview(data).cast("B"))

    def _write_in_steps(self, data: memoryview) -> int:
        assert self._step is not None
        for at in range(0, len(data), self._step):
            self._file.write(data[at : at + self._step])
            if at + self._step <= len(data):
                self._file.flush()
                os.fdatasync(self._file.fileno())
        return len(data)

    def __enter__(self) -> _Flushed:
        return self

    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None:
        if error is None:
            self.close()
        else:
            self._drop()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with _doing(f"writing {self._path}"):
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._drop()

    def _drop(self) -> None:
        """Close the file and ignore errors: closing retries a failed write, and would report it again."""
        with suppress(OSError):
            self._file.close()


def flush(path: Path) -> None:
    """Flush a directory, or a file that another process wrote."""
    with _doing(f"writing {path}"):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


# -- a lease -----------------------------------------------------------------------------------------------------------

LEASE_SECONDS, RENEWAL_SECONDS = 60.0, 15.0


class _Lease:
    """A small file with the writer and the end of its lease. The writer renews it, and stops if it was lost."""

    def __init__(self, destination: Destination, who: str) -> None:
        self._destination = destination
        self._who = json.loads(who)
        self._over = threading.Event()
        self._lost = ""
        self._until = 0.0
        self._renewal = threading.Thread(target=self._renew, name="waltz export lease", daemon=True)

    def take(self) -> None:
        text = self._destination.read(LOCK)
        if text is not None and not self._is_over(text):
            raise ExportHeld(f"{describe_writer(text)} is writing to {self._destination.place}, or was until a moment ago")
        self._write()
        if not self._is_ours():
            raise ExportHeld(
                f"{describe_writer(self._destination.read(LOCK))} began to write to {self._destination.place} just now"
            )
        self._renewal.start()

    def _is_over(self, text: bytes) -> bool:
        try:
            found = json.loads(text)
            if found["host"] == self._who["host"] and not _is_alive(int(found["pid"])):
                return True
            return float(found["until"]) < time.time()
        except (ValueError, KeyError, TypeError):
            return True

    def _write(self) -> None:
        until = time.time() + LEASE_SECONDS
        self._destination.put(LOCK, json.dumps({**self._who, "until": until}).encode())
        self._until = until

    def _is_ours(self) -> bool:
        text = self._destination.read(LOCK)
        return text is not None and json.loads(text).get("run") == self._who["run"]

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL_SECONDS):
            try:
                if not self._is_ours():
                    self._lost = "another exporter has taken it over"
                    return
                self._write()
            except (WaltzError, ValueError) as error:
                self._lost = str(error)
                return

    def check(self) -> None:
        if not self._lost and time.time() >= self._until:  # this process was suspended
            self._lost = f"it was not renewed within {LEASE_SECONDS:.0f} seconds"
        if self._lost:
            raise ExportHeld(
                f"the lock of {self._destination.place} was lost: {self._lost}",
                not_done="what was not published yet was not exported",
            )

    def leave(self) -> None:
        self._over.set()
        self._renewal.join()
        if not self._lost and self._is_ours():
            self._destination.remove(LOCK)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
