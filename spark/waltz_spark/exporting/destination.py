"""Where an export is written: a directory of this machine, or an object store or HDFS by PyArrow's file systems.

Nothing that has a name in an export is ever written over. A file is made under a name that nobody looks at and then takes
its own, which fails if that is taken; a manifest likewise, so of two exporters that both think that they are alone one is
told. On a local file system both are a link, which is atomic, and everything is on the disk before its name is. An object
store has no such call for everybody: there, a name is looked for first, and a lock with a lease keeps the second exporter
away.

A destination is a value: it is pickled and sent to the tasks.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote, urlparse

from waltz_spark.exporting.manifest import LOCK, UNFINISHED
from waltzd.disk.real import translate
from waltzd.errors import BadArgument, DiskFull, ExportHeld, NoPermission, PathMissing, StoreFailed, WaltzError

if TYPE_CHECKING:
    import pyarrow as pa

_ALIASES = {"s3a": "s3", "s3n": "s3", "gs": "gs"}


READ_BYTES = 4 << 20
STEP_BYTES = 64 << 10
"""A flush of much at the end keeps others from the disk for as long as it takes. Of so little, nobody feels it."""


class Output(Protocol):
    """A file that is being written. It is whole, and on the disk if there is one, when it was closed without an error."""

    def write(self, data: Any, /) -> int | None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Output: ...
    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None: ...


class Hold(Protocol):
    """That nobody else writes to the output."""

    def check(self) -> None:
        """Raises when that is not certain any more."""
        ...


class Destination(Protocol):
    """Paths are below the output, with slashes."""

    @property
    def place(self) -> str:
        """For people, and for a second command line."""
        ...

    @property
    def is_on_this_machine(self) -> bool: ...
    def read(self, path: str) -> bytes | None:
        """None if there is no such file."""
        ...

    def names(self, path: str = "") -> list[str]:
        """Of what lies directly in a directory, sorted; none if there is no such directory."""
        ...

    def size(self, path: str) -> int | None: ...
    def put_new(self, path: str, content: bytes) -> bool:
        """A whole small file; False if the name is taken."""
        ...

    def create(self, path: str, *, in_small_steps: bool = False) -> Output:
        """`in_small_steps`: whoever else writes to the same disk is not to wait for this."""
        ...

    def move_new(self, old: str, new: str) -> bool:
        """False if the new name is taken."""
        ...

    def remove(self, path: str) -> None:
        """It may be missing."""
        ...

    def remove_tree(self, path: str) -> None: ...
    def open(self, path: str) -> pa.NativeFile: ...
    def hold(self, who: str) -> AbstractContextManager[Hold]: ...


def destination_of(text: str) -> Destination:
    """A path, or a URI: file:, s3:, gs:, hdfs:, abfs: and whatever else PyArrow knows."""
    found = urlparse(text)
    if len(found.scheme) < 2:  # none, or a drive
        return LocalDestination(str(Path(text).absolute()))
    if found.scheme == "file":
        if found.netloc not in ("", "localhost"):
            raise BadArgument(f"{text} is on another machine; a file: URI has three slashes, as in file:///data/export")
        return LocalDestination(unquote(found.path).rstrip("/") or "/")
    scheme = _ALIASES.get(found.scheme, found.scheme)
    return RemoteDestination(scheme + text[len(found.scheme) :].rstrip("/"))


_NEXT_STEPS: Mapping[type[WaltzError], str] = {
    DiskFull: "free space there, then run the same command again",
    NoPermission: "let the user that runs this read and write there, or name another output",
    PathMissing: "check the path of the output",
}


def failure(error: OSError, what: str) -> WaltzError:
    """What the operating system says, with advice for an export: that of the errors themselves is for a storage."""
    found = translate(error, what)
    return type(found)(
        found.message,
        not_done="the newest manifest counts as before, and nothing that this run has not published yet",
        next_step=_NEXT_STEPS.get(type(found), "look at the file system of the output, then run the same command again"),
        **found.facts,
    )


def measured(destination: Destination, path: str) -> tuple[int, str]:
    """How large a file is, and its SHA-256: all of it is read."""
    size, digest = 0, hashlib.sha256()
    with destination.open(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def who_we_are(run: str) -> str:
    return json.dumps({"run": run, "host": socket.gethostname(), "pid": os.getpid()})


def who_is(text: bytes | None) -> str:
    try:
        found = json.loads(text or b"")
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


# -- this machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalDestination:
    place: str
    is_on_this_machine = True

    def _path(self, path: str) -> Path:
        return Path(self.place, path)

    def read(self, path: str) -> bytes | None:
        try:
            return self._path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure(error, f"reading {self._path(path)}") from error

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._path(path)))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise failure(error, f"reading the directory {self._path(path)}") from error

    def size(self, path: str) -> int | None:
        try:
            return self._path(path).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failure(error, f"looking at {self._path(path)}") from error

    def put_new(self, path: str, content: bytes) -> bool:
        beside = f"{UNFINISHED}/{uuid.uuid4().hex}.new"
        with self.create(beside) as file:
            file.write(content)
        try:
            return self.move_new(beside, path)
        finally:
            self.remove(beside)

    def create(self, path: str, *, in_small_steps: bool = False) -> Output:
        target = self._path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return _Flushed(target, STEP_BYTES if in_small_steps else None)
        except OSError as error:
            raise failure(error, f"writing {target}") from error

    def move_new(self, old: str, new: str) -> bool:
        source, target = self._path(old), self._path(new)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, target)  # unlike a rename, never takes the place of another file
            source.unlink()
            flush(target.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise failure(error, f"naming {target}") from error
        return True

    def remove(self, path: str) -> None:
        try:
            self._path(path).unlink(missing_ok=True)
        except OSError as error:
            raise failure(error, f"removing {self._path(path)}") from error

    def remove_tree(self, path: str) -> None:
        target = self._path(path)
        try:
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=True)  # a task of a run that was killed may still be at it
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise failure(error, f"removing {target}") from error

    def open(self, path: str) -> pa.NativeFile:
        import pyarrow as pa

        try:
            return pa.OSFile(str(self._path(path)), "rb")
        except OSError as error:
            raise failure(error, f"reading {self._path(path)}") from error

    @contextmanager
    def hold(self, who: str) -> Iterator[Hold]:
        """A lock of the operating system: it ends with the process, however that ends, and nobody has to wait for it."""
        path = self._path(LOCK)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+b")
        except OSError as error:
            raise failure(error, f"writing {path}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ExportHeld(f"{who_is(self.read(LOCK))} is writing to {self.place}") from error
            try:
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), who.encode())
            except OSError as error:
                raise failure(error, f"writing {path}") from error
            yield _Certain()


class _Certain:
    def check(self) -> None:
        """The operating system keeps it."""


class _Flushed:
    """A file that is on the disk when it is closed, and gone when it could not be."""

    def __init__(self, path: Path, step_bytes: int | None = None) -> None:
        self._path = path
        self._step = step_bytes
        self._file = path.open("xb")

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data) if self._step is None else self._write_in_steps(memoryview(data).cast("B"))
        except OSError as error:
            raise failure(error, f"writing {self._path}") from error

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
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise failure(error, f"writing {self._path}") from error
        finally:
            self._drop()

    def _drop(self) -> None:
        """To close writes once more what could not be written, and would say so again in other words."""
        with suppress(OSError):
            self._file.close()


def flush(path: Path) -> None:
    """A directory, or a file that somebody else wrote."""
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        raise failure(error, f"writing {path}") from error


# -- an object store, or HDFS ------------------------------------------------------------------------------------------
# A name is looked for before it is taken, because not every store can refuse to write over one. What keeps two exporters
# apart is therefore the lock: a small file with an end, which whoever writes renews, and asks for before each thing that
# counts.

LEASE_SECONDS, RENEWAL_SECONDS = 60.0, 15.0


@dataclass(frozen=True)
class RemoteDestination:
    place: str
    system: Any = None
    """A file system of PyArrow to use in place of the one that the URI names, with `place` as a path in it: for tests."""
    is_on_this_machine = False

    def _there(self, path: str) -> tuple[Any, str]:
        from pyarrow import fs

        if self.system is not None:
            return self.system, f"{self.place}/{path}".rstrip("/")
        try:
            system, root = fs.FileSystem.from_uri(self.place)
        except (ValueError, OSError, NotImplementedError) as error:
            raise BadArgument(
                f"{self.place} cannot be written to: {' '.join(str(error).split())}", not_done="nothing was written"
            ) from error
        return system, f"{root}/{path}".rstrip("/")

    def _info(self, path: str) -> Any:
        system, there = self._there(path)
        with self._said("looking at", path):
            return system.get_file_info(there)

    @contextmanager
    def _said(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _failed(error, f"{doing} {self.place}/{path}") from error

    def read(self, path: str) -> bytes | None:
        system, there = self._there(path)
        try:
            with system.open_input_stream(there) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(error, f"reading {self.place}/{path}") from error

    def names(self, path: str = "") -> list[str]:
        from pyarrow import fs

        system, there = self._there(path)
        with self._said("reading the directory", path):
            found = system.get_file_info(fs.FileSelector(there, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def size(self, path: str) -> int | None:
        return cast(int | None, self._info(path).size)

    def _is_there(self, path: str) -> bool:
        from pyarrow import fs

        return bool(self._info(path).type != fs.FileType.NotFound)

    def put_new(self, path: str, content: bytes) -> bool:
        if self._is_there(path):
            return False
        self._put(path, content)
        return self.read(path) == content

    def _put(self, path: str, content: bytes) -> None:
        with self.create(path) as file:
            file.write(content)

    def create(self, path: str, *, in_small_steps: bool = False) -> Output:
        system, there = self._there(path)
        with self._said("writing", path):
            system.create_dir(there.rpartition("/")[0], recursive=True)
            return cast(Output, system.open_output_stream(there))

    def move_new(self, old: str, new: str) -> bool:
        if self._is_there(new):
            return False
        system, source = self._there(old)
        with self._said("naming", new):
            system.move(source, self._there(new)[1])
        return True

    def remove(self, path: str) -> None:
        if self._is_there(path):
            system, there = self._there(path)
            with self._said("removing", path):
                system.delete_file(there)

    def remove_tree(self, path: str) -> None:
        if self._is_there(path):
            system, there = self._there(path)
            with self._said("removing", path):
                if self._info(path).is_file:
                    system.delete_file(there)
                else:
                    system.delete_dir(there)

    def open(self, path: str) -> pa.NativeFile:
        system, there = self._there(path)
        with self._said("reading", path):
            return system.open_input_file(there)

    @contextmanager
    def hold(self, who: str) -> Iterator[Hold]:
        lease = _Lease(self, who)
        lease.take()
        try:
            yield lease
        finally:
            lease.leave()


class _Lease:
    """A small file that says who writes and until when; whoever writes renews it, and stops when it is not theirs."""

    def __init__(self, destination: RemoteDestination, who: str) -> None:
        self._destination = destination
        self._who = json.loads(who)
        self._over = threading.Event()
        self._lost = ""
        self._until = 0.0
        self._renewal = threading.Thread(target=self._renew, name="waltz export lease", daemon=True)

    def take(self) -> None:
        text = self._destination.read(LOCK)
        if text is not None and not self._is_over(text):
            raise ExportHeld(f"{who_is(text)} is writing to {self._destination.place}, or was until a moment ago")
        self._write()
        if not self._is_ours():
            raise ExportHeld(f"{who_is(self._destination.read(LOCK))} began to write to {self._destination.place} just now")
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
        self._destination._put(LOCK, json.dumps({**self._who, "until": until}).encode())
        self._until = until

    def _is_ours(self) -> bool:
        text = self._destination.read(LOCK)
        return text is not None and json.loads(text).get("run") == self._who["run"]

    def _renew(self) -> None:
        while not self._over.wait(RENEWAL_SECONDS):
            try:
                if not self._is_ours():
                    self._lost = "somebody else has taken it over"
                    return
                self._write()
            except (WaltzError, ValueError) as error:
                self._lost = str(error)
                return

    def check(self) -> None:
        if not self._lost and time.time() >= self._until:  # this process was not let run
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


def _failed(error: OSError, doing: str) -> WaltzError:
    """Some errors are of an operating system; of the others there are only the words."""
    said = " ".join(str(error).split())
    return failure(error, f"{doing}: {said}") if error.errno else StoreFailed(f"{doing}: {said}")
