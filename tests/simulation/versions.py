"""Versions of Waltz on one simulated cluster, and what must never happen between them.

Each daemon runs this code as a `Program`: with the release that it says it is, and with what that release knows of others.
Operators install another version and start it, in each order and back, while everything else goes wrong, and raise the
level of the cluster in between. Now and then a version is installed that does not fit: it must be refused before it has
written anything. Version 0.0 is this code without its version in answers and without frames of single transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.loop import LIFE, Life
from waltzd.cluster.cluster import ROOT, SERVERS, STORAGES
from waltzd.cluster.coordinator import Change
from waltzd.cluster.documents import ServerMeta, decode_root
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import WaltzError
from waltzd.protocol.document import decode
from waltzd.protocol.level import LEVELS, THIS, Program
from waltzd.server.session.replicated_log import ReplicatedLog

if TYPE_CHECKING:
    from tests.simulation.machines import World

BEFORE = Program((0, 0), {(0, 0): 0})
AFTER = Program((0, 2), {**LEVELS, (0, 2): 2})
LATER = Program((0, 3), {**AFTER.levels, (0, 3): 3})
PROGRAMS = {program.version: program for program in (BEFORE, THIS, AFTER, LATER)}


class Mixed(AssertionError):
    """Processes whose versions do not fit have worked together."""


@dataclass
class _Run:
    """A process of a daemon."""

    name: str
    life: Life
    program: Program
    level: int
    """Level of the cluster when it started."""
    since: float
    joined: float | None = None
    """When a server had put itself into the list."""


class Versions:
    def __init__(self, world: World) -> None:
        self.world = world
        self.pair = tuple(PROGRAMS[version] for version in world.setup.versions)
        """Versions that fit: the one in which the cluster began, and the next one."""
        self.installed = dict.fromkeys([*world.storages, *world.servers], self.pair[0])
        self._seen: tuple[float, list[str]] | None = None
        """When the operator who finalizes began to look at the cluster, and the storages that it had then."""
        self._runs: dict[int, _Run] = {}

    @property
    def newest(self) -> Program:
        return self.pair[1]

    @property
    def level(self) -> int:
        """Level of the cluster."""
        root = self.world.zookeeper.tree.find(ROOT)
        return self.pair[0].level if root is None else decode_root(root.data, program=LATER).level

    def program(self, life: Life) -> Program:
        """Return the version of a running daemon."""
        return self._runs[id(life)].program

    def begins(self, life: Life) -> Program:
        """Note the start of a daemon; return its version."""
        program = self.installed[life.name]
        self._runs[id(life)] = _Run(life.name, life, program, self.level, self.world.loop.now)
        self.world.say(life.name, f"runs version {program.version}")
        return program

    def joined(self, life: Life) -> None:
        """Note that a server has put itself into the list, and has looked at the others."""
        run = self._runs[id(life)]
        run.joined = self.world.loop.now
        for other in self._running():
            machine = self.world.servers.get(other.name)
            is_in = machine is not None and machine.server is not None and machine.server._registration.is_announced
            if is_in and other.joined is not None and other is not run and self._entry(other.name) is not None:
                self._check_apart(run, other, "are both in the list of servers")

    def acknowledged(self, owner: Life) -> None:
        """Note that the storage of the current life has acknowledged records to an owner."""
        life = LIFE.get()
        assert life is not None
        run, storage = self._runs[id(owner)], self._runs[id(life)]
        self._check_apart(run, storage, "replicate a log together")
        if storage.program.level < run.level:
            raise Mixed(
                f"{storage.name} of version {storage.program.version} holds records for {run.name}, which began in a "
                f"cluster of level {run.level}"
            )

    def replicates(self, owner: str, level: int, log: ReplicatedLog) -> None:
        """Check the storages that an owner, which has read this level of the cluster, counts on."""
        for name, replicator in log.replicators.items():
            status = log.core.status(name)
            if replicator.is_readable and status is not None:
                program = PROGRAMS[status.version or BEFORE.version]
                if program.level < level:
                    raise Mixed(
                        f"{name} of version {program.version} is a replica for {owner}, which knows that the cluster has "
                        f"level {level}"
                    )

    def writes(self) -> None:
        """Note that the process of the current life changes documents."""
        life = LIFE.get()
        run = None if life is None else self._runs.get(id(life))
        if run is not None and run.program.level < run.level:
            raise Mixed(f"{run.name} of version {run.program.version} writes into a cluster of level {run.level}")

    def looks(self) -> None:
        """Note that the operator who finalizes begins to look at the cluster."""
        self._seen = self.world.loop.now, self.world.zookeeper.tree.names_below(STORAGES)

    def finalized(self, level: int) -> None:
        """Note that the level was raised: no process that is too old may have been there since before the look."""
        assert self._seen is not None, "only an operator raises the level"
        self.world.say("zookeeper", f"the cluster has level {level}")
        seen, storages = self._seen
        for run in self._running():
            is_part = run.since if run.name in storages else run.joined
            if is_part is not None and is_part < seen and run.program.level < level:
                raise Mixed(f"the cluster was finalized at level {level} while {run.name} ran {run.program.version}")

    def install(self, name: str, version: str) -> None:
        self.installed[name] = PROGRAMS[version]

    def mend(self, names: Sequence[str]) -> None:
        """Install a version that fits where there is none, and stop what runs another one. An operator who is about to
        raise the level may still do so."""
        is_raised = any(operator.finalizing for operator in self.world.operators.values())
        level = self.newest.level if is_raised else self.level
        fits = [program for program in self.pair if program.level >= level]
        for name in names:
            if self.installed[name] not in fits:
                self.installed[name] = self.newest
            for run in self._running():
                if run.name == name and run.program not in fits:
                    (self.world.storages.get(name) or self.world.servers[name]).kill()

    def _running(self) -> list[_Run]:
        return [run for run in self._runs.values() if not run.life.is_over]

    def _entry(self, name: str) -> ServerMeta | None:
        entry = self.world.zookeeper.tree.find(f"{SERVERS}/{name}")
        return None if entry is None else decode(ServerMeta, entry.data, name)

    def _check_apart(self, one: _Run, other: _Run, what: str) -> None:
        try:
            one.program.check_server(other.name, other.program.version)
        except WaltzError as error:
            raise Mixed(f"{one.name} and {other.name} {what}: {error.message}") from None


class WatchedTree(MemoryTree):
    """Documents whose changes are judged by the versions of who makes them."""

    versions: Versions | None = None

    def commit(self, changes: Sequence[Change], holder: int, credentials: str | None = None) -> None:
        if self.versions is None:
            super().commit(changes, holder, credentials)
            return
        before = self.versions.level
        super().commit(changes, holder, credentials)
        self.versions.writes()
        if self.versions.level > before:
            self.versions.finalized(self.versions.level)


def takes_singles(world: World) -> bool:
    """Return whether the server of the current life takes frames of single transactions."""
    life = LIFE.get()
    if "singles" not in world.setup.faults or life is None:
        return False
    versions = world.versions
    return versions is None or versions.program(life) is not BEFORE
