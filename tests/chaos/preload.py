"""Libraries that are put in front of the C library of a daemon: its disk and its clock, changed while it runs.

Each daemon has one small file for its disk and one for its clock, which the library maps; writing there is all it takes.
"""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path

SOURCES = {
    "disk": Path(__file__).parents[1] / "process" / "faultio.c",
    "clock": Path(__file__).with_name("clock.c"),
}
DISK_PAGE, CLOCK_PAGE = struct.Struct("=5i"), struct.Struct("=q")


@functools.cache
def refusal() -> str | None:
    return None if compiler() is not None else "needs a C compiler"


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


@dataclass(frozen=True, kw_only=True)
class DiskTrouble:
    """In the order of `struct page` in faultio.c."""

    flush_delay_ms: int = 0
    write_delay_ms: int = 0
    short_percent: int = 0
    flush_fails: int = 0
    flush_lies: int = 0


class Preload:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: list[str] = []

    def build(self) -> None:
        self._folder.mkdir()
        found = compiler()
        assert found is not None
        for name, source in SOURCES.items():
            library = self._folder / f"{name}.so"
            subprocess.run([found, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(source), "-ldl"], check=True)
            self._libraries.append(str(library))

    def environment(self, name: str, data: Path) -> dict[str, str]:
        """For one daemon, whose disk troubles concern files under `data`."""
        self.spoil(name, DiskTrouble())
        self.shift(name, 0)
        return {
            "LD_PRELOAD": ":".join(self._libraries),
            "FAULTIO_PATH": str(data),
            "FAULTIO_PAGE": str(self._page(name, "disk")),
            "CLOCK_PAGE": str(self._page(name, "clock")),
        }

    def spoil(self, name: str, trouble: DiskTrouble) -> None:
        self._write(self._page(name, "disk"), DISK_PAGE.pack(*astuple(trouble)))

    def flush_fails(self, name: str) -> int:
        """How many flushes are still going to fail."""
        found: tuple[int, ...] = DISK_PAGE.unpack(self._page(name, "disk").read_bytes())
        return found[3]

    def shift(self, name: str, seconds: int) -> None:
        self._write(self._page(name, "clock"), CLOCK_PAGE.pack(seconds * 10**9))

    def _page(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"

    @staticmethod
    def _write(page: Path, raw: bytes) -> None:
        """In place: it is mapped, and must stay the same file and the same size."""
        with page.open("r+b" if page.exists() else "wb", buffering=0) as file:
            file.write(raw)
