"""A real cluster on this machine: ZooKeeper, storages and servers as processes under one directory, on loopback.

Nothing outside the directory is written. The cluster is its blueprint; the processes come and go, outlive the command that
started them, and the next command finds them by what is written down in the directory. One command at a time changes it.

A cluster that was made earlier holds transactions, and a part of it may be enough to work, or to mend the rest with: what
runs is left running, whatever else fails, and the error says what does and what to type. What cannot come up for the first
time holds nothing, and is stopped again.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from waltzctl.blueprint import (
    BLUEPRINT,
    ZOOKEEPER,
    Blueprint,
    draw,
    grown,
    load_blueprint,
    load_lives,
    save_blueprint,
    save_lives,
)
from waltzctl.numbers import spell
from waltzctl.picture.look import look
from waltzctl.picture.picture import Picture
from waltzctl.playground.daemon import Daemon, State
from waltzctl.playground.directory import LOCK, check_whole, directory_lock, remove
from waltzctl.playground.preflight import check_machine, check_ports
from waltzctl.playground.zookeeper_process import java_command
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.disk.real import translate
from waltzd.errors import (
    BadArgument,
    DaemonEnded,
    DirectoryHeld,
    NodeMissing,
    NoLocalCluster,
    PartitionsClosed,
    WaltzError,
)

if TYPE_CHECKING:
    from waltzctl.placement.creation import Wish

NAME, ROOT = "local", "/waltz"
SESSION_SECONDS, DRAIN_SECONDS = 4, 10
"""Of servers: shorter than what is good in earnest, so that something happens while somebody watches."""
START_SECONDS, END_SECONDS = 60.0, 45.0
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.1
OPEN_SECONDS = 60.0
SETTLE_SECONDS = 15.0
"""How long to wait for the last replicas, when all partitions take transactions already; and for partitions to open, when
it is known that a daemon is missing."""
STILL_SECONDS = 2.0
"""Partitions that did not move for so long are where they are wanted, although servers do not have equally many."""
TOLD_PARTITIONS = 5
PROBE_SECONDS = 2.0
MAKING = {"log", LOCK, BLUEPRINT, f"{BLUEPRINT}.new"}
"""What is there when another one makes a cluster at this moment, or was killed while it did."""
Say = Callable[[str], None]
Show = Callable[[str, State], None]


def ignore(*_: object) -> None:
    """For callers that show no progress."""


class LocalCluster:
    """`settings` are for the configuration files of its daemons, by kind: "storage", "server". `say` is told what is waited
    for, `show` what becomes of each daemon."""

    def __init__(
        self,
        directory: Path,
        blueprint: Blueprint,
        *,
        say: Say = ignore,
        show: Show = ignore,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.directory = directory
        self.blueprint = blueprint
        self._say = say
        self._show = show
        self._settings = settings or {}
        self.daemons = {name: self._daemon(name) for name in blueprint.names}
        self.recall()

    @classmethod
    def make(
        cls,
        directory: Path,
        *,
        partitions: int = 4,
        storages: int = 3,
        servers: int = 2,
        replication: int = 3,
        say: Say = ignore,
        show: Show = ignore,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> LocalCluster:
        """A new one; nothing is started yet."""
        check_whole(directory)
        is_other = directory.exists() and (not directory.is_dir() or bool(set(os.listdir(directory)) - MAKING))
        # After that look: what is more than MAKING comes behind the blueprint. And before the lock, which would keep the
        # command that has made a cluster from starting it.
        _check_unmade(directory)
        if is_other:
            raise BadArgument(
                f"{directory} is not empty, and holds no cluster that `waltzctl up` made",
                not_done="nothing was made or started",
                next_step="name a new directory, or an empty one",
            )
        try:
            (directory / "log").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise translate(error, f"making the directory {directory}") from error
        with directory_lock(directory):
            _check_unmade(directory)
            blueprint = draw(directory, partitions=partitions, replication=replication, storages=storages, servers=servers)
            save_blueprint(directory, blueprint)
        return cls(directory, blueprint, say=say, show=show, settings=settings)

    @classmethod
    def find(cls, directory: Path, *, say: Say = ignore, show: Show = ignore) -> LocalCluster:
        """The one that was made in this directory."""
        return cls(directory, load_blueprint(directory), say=say, show=show)

    def grow(self, *, storages: int, servers: int) -> None:
        """More daemons, for the next start. Servers take part at once; a storage waits until an operator adds it."""
        with directory_lock(self.directory):
            self.recall()
            check_whole(self.directory)
            more = {"storages": max(storages, self.blueprint.storages), "servers": max(servers, self.blueprint.servers)}
            self._draw_anew(grown(self.blueprint, self.directory, **more))
            save_blueprint(self.directory, self.blueprint)

    def _draw_anew(self, blueprint: Blueprint) -> None:
        """It has grown."""
        self.blueprint = blueprint
        known = self.daemons
        self.daemons = {name: known[name] if name in known else self._daemon(name) for name in blueprint.names}

    # -- where things are

    @property
    def coordinator_hosts(self) -> str:
        return self.blueprint.addresses(ZOOKEEPER)[0]

    @property
    def server_addresses(self) -> list[str]:
        """For applications."""
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.server_names]

    @property
    def storage_addresses(self) -> list[str]:
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.storage_names]

    @property
    def storage_directories(self) -> list[Path]:
        return [self.directory / name / "data" for name in self.blueprint.storage_names]

    @property
    def running(self) -> list[str]:
        return [name for name, daemon in self.daemons.items() if daemon.is_running]

    def recall(self) -> None:
        """Which daemons there are and which processes were started, also by others."""
        with suppress(NoLocalCluster):  # it is being removed
            there = load_blueprint(self.directory)
            if there.names != self.blueprint.names:
                self._draw_anew(there)
        for name, life in load_lives(self.directory).items():
            if name in self.daemons:
                self.daemons[name].take_over(life)

    def remember(self) -> None:
        lives = {name: daemon.life for name, daemon in self.daemons.items() if daemon.life is not None}
        save_lives(self.directory, lives)

    # -- what the daemons are given

    def _daemon(self, name: str) -> Daemon:
        home = self.directory / name
        if name == ZOOKEEPER:
            arguments = [ZOOKEEPER, "--directory", str(home.absolute()), "--listen", self.coordinator_hosts]
            return Daemon(name, arguments, self._log(name), lambda _: _serves(self.coordinator_hosts))
        kind = "storage" if name in self.blueprint.storage_names else "server"
        arguments = [kind, "--config", str((home / f"{kind}.yml").absolute())]
        daemon = Daemon(name, arguments, self._log(name), lambda words: f"waltzd {kind} is ready: " in words)
        daemon.environment["STATE_DIRECTORY"] = str(home.absolute())
        return daemon

    def _log(self, name: str) -> Path:
        return self.directory / "log" / f"{name}.log"

    def _write_settings(self, name: str) -> None:
        listen, admin = self.blueprint.addresses(name)
        fields: dict[str, object] = {"listen": listen, "admin_listen": admin}
        if name in self.blueprint.storage_names:
            kind = "storage"
            fields |= {
                "name": name,
                "directory": (self.directory / name / "data").absolute(),
                "cluster_key": self.blueprint.key,
                "partitions": self.blueprint.partitions,
            }
        else:
            kind = "server"
            fields |= {
                "name": name,
                "coordinator": self.coordinator_hosts,
                "cluster": ROOT,
                "session_seconds": SESSION_SECONDS,
                "drain_seconds": DRAIN_SECONDS,
            }
        fields |= self._settings.get(kind, {})
        lines = [
            "# Written by `waltzctl up` at every start.",
            *(f"{key}: {_quoted(value)}" for key, value in fields.items()),
        ]
        path = self.directory / name / f"{kind}.yml"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise translate(error, f"writing {path}") from error

    # -- up

    def start(self) -> Picture:
        """Everything that does not run yet; return when every partition is open.

        When that fails, a cluster that holds nothing yet is stopped again, as far as it was started here. One that was made
        before runs on, as far as it runs: what is left may be enough, and is what it can be mended with."""
        with directory_lock(self.directory):
            self.recall()
            before = self.running
            is_new = not self.blueprint.is_founded
            was_started = False
            failed: dict[str, WaltzError] = {}
            try:
                self._check()
                for name in self.daemons:
                    self._show(name, State.READY if name in before else State.WAITS)
                failed |= self._start([ZOOKEEPER, *self.blueprint.storage_names], is_new=is_new)
                loop.run(self._found())
                failed |= self._start(self.blueprint.server_names, is_new=is_new)
                was_started = True
                found = loop.run(self._wait_open(failed, is_new=is_new))
                if is_new and found.closed:
                    raise closed_error(found)
            except BaseException as error:
                if is_new or not was_started or not isinstance(error, WaltzError):
                    self._end([name for name in self.running if name not in before])
                    raise
                raise unseen_error(self.directory, error, self.running) from error
            missed = unfinished_error(self.directory, found, self.running, failed)
            if missed is not None:
                raise missed
            return found

    async def _wait_open(self, failed: dict[str, WaltzError], *, is_new: bool) -> Picture:
        """Until every partition takes transactions with all of its replicas. When that takes long: without some of them,
        or with partitions that are closed. `failed`: daemons that did not come up, and why; one that ends meanwhile is
        added. Of a cluster that is new, the first that fails is raised instead."""
        started = moved = time.monotonic()
        owners: list[str | None] = []
        async with self._coordinator() as coordinator:
            while True:
                self._check_running(failed, is_new=is_new)
                found = await look(coordinator)
                now = time.monotonic()
                if owners != (owners := [partition.owner for partition in found.partitions]):
                    moved = now
                seconds = now - started
                is_settled = self._is_whole(found) and (is_even(found) or now - moved > STILL_SECONDS)
                if not found.closed and (failed or seconds > SETTLE_SECONDS or is_settled):
                    return found
                if seconds > (SETTLE_SECONDS if failed else OPEN_SECONDS):
                    return found
                self._say(f"waiting for partitions: {len(found.partitions) - len(found.closed)} are open")
                await asyncio.sleep(LOOK_SECONDS)

    def _check_running(self, failed: dict[str, WaltzError], *, is_new: bool) -> None:
        for name, daemon in self.daemons.items():
            if name in failed:
                continue
            try:
                daemon.check_running()
            except DaemonEnded as error:
                self._show(name, State.ENDED)
                if is_new or name == ZOOKEEPER:
                    raise
                failed[name] = error

    def _is_whole(self, found: Picture) -> bool:
        """Every replica takes part, and every server is there."""
        there = {view.meta.name for view in found.servers if view.said is not None}
        return not found.short and there.issuperset(self.blueprint.server_names)

    def start_one(self, name: str) -> None:
        with directory_lock(self.directory):
            self._start([name], is_new=True)

    def _check(self) -> None:
        """What can be known before anything is started."""
        check_whole(self.directory)
        wanted = [name for name, daemon in self.daemons.items() if not daemon.is_running]
        if wanted:
            check_machine(self.directory)
        if ZOOKEEPER in wanted:
            java_command()
        for name in wanted:
            check_ports(self.directory, self.blueprint, name)

    def _start(self, names: list[str], *, is_new: bool) -> dict[str, WaltzError]:
        """Those that did not become ready, and why; an error where nothing can go on without one."""
        for name in names:
            if not self.daemons[name].is_running:
                if name != ZOOKEEPER:
                    self._write_settings(name)
                with undisturbed():  # what runs and is not written down would never be found again
                    self.daemons[name].spawn()
                    self.remember()
                self._show(name, State.STARTS)
        failed = self._wait_ready(names, needed=set(names) if is_new else {ZOOKEEPER})
        self.remember()
        return failed

    def _wait_ready(self, names: list[str], *, needed: set[str]) -> dict[str, WaltzError]:
        deadline = time.monotonic() + START_SECONDS
        waiting = list(names)
        failed: dict[str, WaltzError] = {}
        while waiting:
            self._say(f"waiting for {', '.join(waiting)}")
            for name in list(waiting):
                try:
                    if self.daemons[name].is_ready():
                        self._show(name, State.READY)
                        waiting.remove(name)
                except DaemonEnded as error:
                    self._show(name, State.ENDED)
                    if name in needed:
                        raise
                    failed[name] = error
                    waiting.remove(name)
            if waiting and time.monotonic() > deadline:
                for name in waiting:
                    failed[name] = self.daemons[name].silent(START_SECONDS)
                    if name in needed:
                        raise failed[name]
                break
            if waiting:
                time.sleep(POLL_SECONDS)
        return failed

    async def _found(self) -> None:
        """Its documents and empty replicas, once. What the operator did with it since then is not undone by a start."""
        from waltzctl.placement.creation import create_cluster  # a look at a cluster that is there needs none of it

        async with self._coordinator() as coordinator:
            there = await self._written_down(coordinator)
            if there is not None and self.blueprint.is_founded:
                return
            self._say("writing down the cluster, making its replicas")
            now = datetime.now(UTC).isoformat(timespec="seconds")
            await create_cluster(coordinator, there or self._wish(), created=now)
        self.blueprint = replace(self.blueprint, is_founded=True)
        save_blueprint(self.directory, self.blueprint)

    async def _written_down(self, coordinator: Coordinator) -> Wish | None:
        """What the coordinator has, as what would be wished for to complete it: the replicas come after the documents."""
        cluster = Cluster(coordinator)
        try:
            meta = await cluster.meta()
        except NodeMissing:
            return None
        return replace(
            self._wish(),
            name=meta.name,
            key=meta.key,
            partitions=meta.partitions,
            storages=tuple((await cluster.storages()).values()),
        )

    def _wish(self) -> Wish:
        from waltzctl.placement.creation import Wish

        return Wish(
            name=NAME,
            key=self.blueprint.key,
            partitions=self.blueprint.partitions,
            replication=self.blueprint.replication,
            storages=tuple(
                StorageMeta(name=name, listen=listen, admin_listen=admin, group=name)
                for name in self.blueprint.storage_names
                for listen, admin in [self.blueprint.addresses(name)]
            ),
        )

    async def picture(self) -> Picture:
        async with self._coordinator() as coordinator:
            return await look(coordinator)

    @asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[Coordinator]:
        coordinator = ZooKeeperCoordinator(self.coordinator_hosts, ROOT)
        await coordinator.start()
        try:
            yield coordinator
        finally:
            await coordinator.close()

    # -- down

    def stop(self) -> list[str]:
        """In order: servers, storages, ZooKeeper. The names of those that had to be killed."""
        with directory_lock(self.directory):
            self.recall()
            return self._end(self.running)

    def clear(self) -> list[str]:
        """Stop everything, and remove all that is ours. The names of those that had to be killed."""
        with directory_lock(self.directory):
            self.recall()
            killed = self._end(self.running)
            self._say("removing its files")
            remove(self.directory)
            return killed

    def kill(self) -> None:
        """At once. What was acknowledged is on the disk."""
        self.recall()
        for name in self.running:
            self.daemons[name].kill()

    def _end(self, names: list[str]) -> list[str]:
        killed = []
        for wave in (self.blueprint.server_names, self.blueprint.storage_names, [ZOOKEEPER]):
            ending = [name for name in wave if name in names]
            for name in ending:
                self.daemons[name].ask_to_end()
                self._show(name, State.ENDS)
            for name in ending:
                self._say(f"waiting for {name} to end")
                if not self.daemons[name].wait_end(END_SECONDS):
                    killed.append(name)
                self._show(name, State.STOPPED)
        return killed


def is_even(found: Picture) -> bool:
    owned = [len(view.said.partitions) for view in found.servers if view.said is not None and not view.meta.is_draining]
    return not owned or max(owned) - min(owned) <= 1


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits until this is over. It reaches the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _check_unmade(directory: Path) -> None:
    if (directory / BLUEPRINT).exists():
        raise DirectoryHeld(
            f"another program has just made a cluster in {directory}",
            not_done="nothing was made or started",
            next_step="the same command again continues with that cluster",
        )


def _quoted(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else "'" + str(value).replace("'", "''") + "'"


def _serves(address: str) -> bool:
    """Whether ZooKeeper answers there."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as connection:
            connection.sendall(b"srvr")
            return connection.recv(64).startswith(b"Zookeeper version")
    except OSError:
        return False


# -- what is said when it does not come up -----------------------------------------------------------------------------


def closed_error(found: Picture) -> PartitionsClosed:
    """Of a cluster that is new: nothing of it stays."""
    return _closed(found, DaemonEnded.not_done, "read the logs of the daemons; `waltzctl up` again goes on from here")


def unfinished_error(
    directory: Path, found: Picture, running: Sequence[str], failed: Mapping[str, WaltzError]
) -> WaltzError | None:
    """Of a cluster that was there before: what is missing, while the rest runs."""
    if not failed:
        stays = f"{_stays(running)}, and nothing was stopped"
        takes = spell((view.partition for view in found.closed), "takes", "take")
        return _closed(found, f"{takes} no transactions yet; {stays}", _mending(directory)) if found.closed else None
    if found.closed:
        partitions = f"{spell((view.partition for view in found.closed), 'takes', 'take')} no transactions"
    else:
        partitions = "every partition takes transactions all the same"
    missing = f"{', '.join(failed)} {'is' if len(failed) == 1 else 'are'} not ready"
    first = next(iter(failed.values()))
    again = f"read what it says in its log, then `waltzctl up {shlex.quote(str(directory))} --detach` again"
    return type(first)(
        "\n".join(error.message for error in failed.values()),
        not_done=f"{missing}; {partitions}. {_stays([name for name in running if name not in failed])}",
        next_step=f"{again}. {_mending(directory)}; a storage that is lost is replaced by `waltzctl storage replace`",
    )


def unseen_error(directory: Path, error: WaltzError, running: Sequence[str]) -> WaltzError:
    """It ran, and then nobody could say how it is."""
    return type(error)(
        error.message,
        not_done=f"whether the partitions are open is not known; {_stays(running)}, and nothing was stopped",
        next_step=_mending(directory),
    )


def _closed(found: Picture, not_done: str, next_step: str) -> PartitionsClosed:
    waiting = "; ".join(f"partition {view.partition}: {view.waiting}" for view in found.closed[:TOLD_PARTITIONS])
    number = len(found.closed)
    return PartitionsClosed(
        f"{number} partition{' is' if number == 1 else 's are'} not open after {OPEN_SECONDS:g} seconds. {waiting}",
        not_done=not_done,
        next_step=next_step,
    )


def _stays(running: Sequence[str]) -> str:
    return f"{', '.join(running)} {'runs' if len(running) == 1 else 'run'}" if running else "nothing runs"


def _mending(directory: Path) -> str:
    place = shlex.quote(str(directory))
    return f"`waltzctl status --directory {place}` says what is missing, `waltzctl down {place}` stops everything"
