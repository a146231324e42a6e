"""Notes of a long piece of work, so that a killed one goes on where it was.

One line a note, each with its own checksum, appended and flushed. A line that a crash left half written is no note. The
notes say what was true then; whoever reads them checks that it still is.
"""

from __future__ import annotations

import json
import zlib

from waltzd.disk import Disk, File

BYTES_MAX = 64 << 20
"""A quarter of a million segments; what stands behind is done again."""


class Journal:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._notes: dict[str, dict[str, object]] = {}
        self._file: File | None = None
        if disk.exists(path):
            self._read()

    def _read(self) -> None:
        file = self._disk.open(self._path)
        try:
            raw = file.read(0, BYTES_MAX)
        finally:
            file.close()
        for line in raw.splitlines():
            body, _, crc = line.rpartition(b" ")
            if crc == b"%08x" % zlib.crc32(body) and (note := _note(body)) is not None:
                self._notes[note[0]] = note[1]

    def get(self, name: str) -> dict[str, object] | None:
        return self._notes.get(name)

    def add(self, name: str, facts: dict[str, object]) -> None:
        if self._file is None:
            exists = self._disk.exists(self._path)
            self._file = self._disk.open(self._path, write=True) if exists else self._disk.create(self._path)
        body = json.dumps([name, facts], sort_keys=True).encode()
        # The line feed in front ends a line that was left half written.
        self._file.write(self._file.size(), b"\n%s %08x\n" % (body, zlib.crc32(body)))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        self.close()
        if self._disk.exists(self._path):
            self._disk.remove(self._path)


def _note(body: bytes) -> tuple[str, dict[str, object]] | None:
    """A name and its facts; None for a line that somebody else wrote, whatever its checksum says."""
    try:
        match json.loads(body):
            case [str() as name, dict() as facts]:
                return name, facts
    except (ValueError, RecursionError):
        pass
    return None
