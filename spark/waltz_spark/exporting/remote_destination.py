"""An export in an object store or on HDFS, by PyArrow's file systems.

A name is looked for before it is taken, because not every store can refuse to write over one. What keeps two exporters
apart is therefore the lock: a small file with an end, which whoever writes renews, and asks for before each thing that
counts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from waltz_spark.exporting.destination import Hold, Output, failure, who_is
from waltz_spark.exporting.manifest import LOCK
from waltzd.errors import BadArgument, ExportHeld, StoreFailed, WaltzError

if TYPE_CHECKING:
    import pyarrow as pa

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
