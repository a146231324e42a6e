"""The coordinator within one process: for tests, for the simulator, for `waltzd.testing`.

`MemoryTree` holds the nodes; each `connect` is a coordinator session of its own. There is no thread and no clock: the
behaviour depends only on the order of calls and on what a test does to a session: `expire`, `disconnect`, `reconnect`,
`lose_answer`. It passes the same contract tests as `waltzd.cluster.zookeeper`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from waltzd.cluster.coordinator import Change, Check, Create, Delete, Node, Set, Watchers, check_size
from waltzd.errors import CannotConnect
from waltzd.errors.operations import ChangedMeanwhile, CoordinatorRefused, NodeExists, NodeMissing


@dataclass(frozen=True)
class _Entry:
    data: bytes
    version: int
    created: int
    modified: int
    """Number of the commit that last changed the data."""
    children: int
    """Number of the commit that last changed the names below the node."""
    holder: int | None
    """Session with which an ephemeral node is deleted; None for a persistent node."""
    owner: str | None = None
    """Credentials that are needed for any access to the node; None if it is open."""


def check_access(path: str, entry: _Entry | None, credentials: str | None) -> None:
    """Raise `CoordinatorRefused` if these credentials may not access the node."""
    if entry is not None and entry.owner not in (None, credentials):
        raise CoordinatorRefused(f"the coordinator does not let this process near {path}", path=path)


def _above(path: str) -> str | None:
    """Return the path of the parent; None for the root."""
    return None if path == "/" else path.rpartition("/")[0] or "/"


class MemoryTree:
    """The nodes. `pause` is awaited before and after each call takes effect: a simulator spends the network delay there."""

    def __init__(self, pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)) -> None:
        self.pause = pause
        self._entries: dict[str, _Entry] = {}
        self._commits = 0
        self._holders = 0
        self._connected: list[MemoryCoordinator] = []

    def connect(self, credentials: str | None = None) -> MemoryCoordinator:
        coordinator = MemoryCoordinator(self, credentials)
        self._connected.append(coordinator)
        return coordinator

    def leave(self, coordinator: MemoryCoordinator) -> None:
        self._connected.remove(coordinator)

    def new_holder(self) -> int:
        self._holders += 1
        return self._holders

    def find(self, path: str) -> _Entry | None:
        return self._entries.get(path)

    def names_below(self, path: str) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in self._entries if _above(name) == path)

    def end(self, holder: int) -> None:
        """End a session: delete its ephemeral nodes."""
        held = [path for path, entry in self._entries.items() if entry.holder == holder]
        if held:
            owners = [owner for path in held if (owner := self._entries[path].owner) is not None]
            self.commit([Delete(path, self._entries[path].version) for path in held], holder, *owners[:1])

    def commit(self, changes: Sequence[Change], holder: int, credentials: str | None = None) -> None:
        entries = dict(self._entries)
        self._commits += 1
        touched: list[str] = []
        for change in changes:
            touched += self._apply(entries, change, holder, credentials)
        self._entries = entries
        for coordinator in self._connected:
            coordinator.watchers.wake(touched)

    def protect(self, path: str, credentials: str) -> None:
        check_access(path, self._entries[path], credentials)
        self._entries[path] = replace(self._entries[path], owner=credentials)

    def _apply(self, entries: dict[str, _Entry], change: Change, holder: int, credentials: str | None) -> list[str]:
        """Apply a change to `entries`, or raise; return the paths that were changed."""
        path = change.path
        if isinstance(change, Create):
            return self._create(entries, change, holder, credentials)
        entry = entries.get(path)
        if entry is None:
            raise NodeMissing(f"the coordinator has no node {path}", path=path)
        check_access(path, entry, credentials)
        if entry.version != change.version:
            raise ChangedMeanwhile(f"{path} has version {entry.version}, not {change.version}", path=path)
        match change:
            case Check():
                return []
            case Set(data=data):
                entries[path] = replace(entry, data=data, version=entry.version + 1, modified=self._commits)
                return [path]
            case Delete():
                if any(_above(name) == path for name in entries):
                    raise ChangedMeanwhile(f"{path} has nodes below it", path=path)
                del entries[path]
                return [path, *self._mark_above(entries, path)]

    def _create(self, entries: dict[str, _Entry], change: Create, holder: int, credentials: str | None) -> list[str]:
        path, above = change.path, _above(change.path)
        if path in entries:
            raise NodeExists(f"the coordinator has a node {path} already", path=path)
        if above is not None and above not in entries:
            raise NodeMissing(f"the coordinator has no node {above} to create {path} in", path=above)
        if above is not None and entries[above].holder is not None:
            raise CoordinatorRefused(f"the ephemeral node {above} cannot have nodes below it", path=path)
        if above is not None:
            check_access(path, entries[above], credentials)
        owner = None if "/" in entries and entries["/"].owner is None else credentials
        now = self._commits
        entries[path] = _Entry(change.data, 0, now, now, now, holder if change.ephemeral else None, owner)
        return [path, *self._mark_above(entries, path)]

    def _mark_above(self, entries: dict[str, _Entry], path: str) -> list[str]:
        above = _above(path)
        if above is None:
            return []
        entries[above] = replace(entries[above], children=self._commits)
        return [above]


class MemoryCoordinator:
    """One session on a `MemoryTree`."""

    def __init__(self, tree: MemoryTree, credentials: str | None = None) -> None:
        self._tree, self._credentials = tree, credentials
        self._holder = tree.new_holder()
        self._session = 1
        self._is_connected, self._is_closed, self._is_expired = True, False, False
        self._loses_answer = False
        self.watchers = Watchers()
        self.on_change = self.watchers.on_change

    # -- what a test does to it ----------------------------------------------------------------------------------------

    def lapse(self) -> None:
        """Expire the session without notice, as if its process did not run. `expire` or `reconnect` report it later."""
        self._tree.end(self._holder)
        self._is_expired = True

    def expire(self) -> None:
        """Expire the session; report it as soon as there is contact."""
        self.lapse()
        if self._is_connected:
            self._renew()
            self._say()

    def disconnect(self) -> None:
        if self._is_connected:
            self._is_connected = False
            self._say()

    def reconnect(self) -> None:
        """Restore the contact; changes in between become visible."""
        if self._is_closed or self._is_connected:
            return
        self._is_connected = True
        if self._is_expired:
            self._renew()
        self._say()

    def lose_answer(self) -> None:
        """Make the next commit take effect and raise `CannotConnect`."""
        self._loses_answer = True

    def _renew(self) -> None:
        self._holder, self._is_expired = self._tree.new_holder(), False
        self._session += 1

    def _say(self) -> None:
        self.watchers.wake()
        self.watchers.tell()

    # -- Coordinator ---------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def session(self) -> int:
        return self._session

    async def get(self, path: str) -> Node | None:
        await self._cross()
        entry = self._tree.find(path)
        check_access(path, entry, self._credentials)
        mine = self._holder
        await self._cross()
        return None if entry is None else Node(entry.data, entry.version, entry.created, entry.holder == mine)

    async def children(self, path: str) -> list[str]:
        await self._cross()
        check_access(path, self._tree.find(path), self._credentials)
        names = self._tree.names_below(path)
        await self._cross()
        return names

    async def commit(self, changes: Sequence[Change]) -> None:
        check_size(changes)
        await self._cross()
        self._tree.commit(changes, self._holder, self._credentials)
        if self._loses_answer:
            self._loses_answer = False
            raise CannotConnect("the answer of the coordinator was lost")
        await self._cross()

    @property
    def has_credentials(self) -> bool:
        return self._credentials is not None

    async def is_open(self, path: str) -> bool:
        await self._cross()
        entry = self._tree.find(path)
        await self._cross()
        return entry is not None and entry.owner is None

    async def is_ours(self, path: str) -> bool:
        await self._cross()
        entry = self._tree.find(path)
        await self._cross()
        return entry is None or entry.owner == self._credentials

    async def protect(self, path: str) -> None:
        assert self._credentials is not None
        await self._cross()
        self._tree.protect(path, self._credentials)
        await self._cross()

    async def open_above(self) -> list[str]:
        return []  # there is nothing above

    async def close_above(self) -> list[str]:
        return []

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        with self.watchers.waiter(paths) as woken:
            if seen is None:
                await self._cross()
            while True:
                self._check_open()
                woken.clear()
                if self._is_connected and (token := self._token(paths)) != seen:
                    return token
                await woken.wait()

    def _token(self, paths: Sequence[str]) -> object:
        entries = [(path, self._tree.find(path)) for path in paths]
        return self._session, tuple(
            (path, entry and (entry.created, entry.modified, entry.children)) for path, entry in entries
        )

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed, self._is_connected = True, False
        self._tree.leave(self)
        self._tree.end(self._holder)
        self._say()

    async def _cross(self) -> None:
        """Spend the delay of a message to the coordinator or back; raise if there is no contact."""
        self._check_contact()
        await self._tree.pause()
        self._check_contact()

    def _check_contact(self) -> None:
        self._check_open()
        if not self._is_connected:
            raise CannotConnect("the coordinator does not answer")
        if self._is_expired:
            raise CannotConnect("the coordinator has given this session up")

    def _check_open(self) -> None:
        if self._is_closed:
            raise CannotConnect("the connection to the coordinator is closed")
