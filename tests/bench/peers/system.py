"""What a system has to offer so that the same load can be put on it: a server side that is started and ended, and a client.

The server side lives in the process that compares; it starts programs, says where they are, and never sends load. The
client (`Session`) lives in the process that makes the load. A transaction belongs to a *slot*: a key whose version it
checks and raises, so that each depends on the one before it in its slot, and nobody else writes there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from tests.bench.peers.process import Process

LANES = 64
"""Connections of clients that cannot share one: as many as there are clients at most."""
LANES_MANY = 8
"""Groups in which many in flight are sent: while one is being answered, the others keep the servers busy."""
READY_SECONDS = 60.0
PAUSE_SECONDS = 0.1
T = TypeVar("T")


class NotCommittedError(Exception):
    """The load is made so that no transaction can conflict: a refusal means that the comparison is wrong."""


@dataclass(frozen=True)
class Facts:
    """What has to be known beside a figure."""

    version: str
    durability: str
    """What is true when a transaction is acknowledged."""
    caveat: str


class Session(Protocol):
    async def open(self) -> None: ...

    async def append(self, slot: int, payload: bytes) -> None:
        """One transaction; returns when it is acknowledged."""

    async def append_all(self, lane: int, slots: range, payload: bytes) -> None:
        """One transaction for each slot, all in flight together, each committed for itself."""

    async def kept(self) -> int:
        """How many transactions the servers hold, asked of them and not remembered."""

    async def close(self) -> None: ...


class System(ABC):
    name: ClassVar[str]
    package: ClassVar[str]
    """How to get it, when it is missing."""

    def __init__(self, home: Path, ports: Iterator[int]) -> None:
        """`home`: an empty directory of its own."""
        self.home = home
        self.ports = ports
        self.processes: list[Process] = []

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """What is not here; None when it can be started."""

    @abstractmethod
    def start(self) -> None: ...

    @property
    @abstractmethod
    def address(self) -> tuple[str, ...]:
        """What its session is told."""

    @property
    @abstractmethod
    def facts(self) -> Facts: ...

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def stop(self) -> None:
        """At once; what was written is thrown away."""
        for process in reversed(self.processes):
            process.stop()

    def run(self, process: Process) -> Process:
        self.processes.append(process)
        process.start()
        return process


def find_program(name: str) -> Path | None:
    """The program that a Python package brought into this environment, or the machine's own, also where only root looks."""
    folders = [str(Path(sys.prefix) / "bin"), os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(folder for folder in folders if folder))
    return Path(found) if found else None


def missing_of(programs: Sequence[str], modules: Sequence[str]) -> str | None:
    absent = [f"the program {name}" for name in programs if find_program(name) is None]
    absent += [f"the Python package {name}" for name in modules if importlib.util.find_spec(name) is None]
    return " and ".join(absent) or None


async def until_it_works(what: str, attempt: Callable[[], Awaitable[T]], *errors: type[Exception]) -> T:
    """Servers that have just begun refuse for a while; one of `errors` is such a refusal."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + READY_SECONDS
    while True:
        try:
            return await attempt()
        except errors as error:
            if clock() > deadline:
                raise TimeoutError(f"{what}: not within {READY_SECONDS:g} seconds: {error!r}") from error
        await asyncio.sleep(PAUSE_SECONDS)
