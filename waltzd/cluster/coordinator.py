"""The interface to the coordinator (ZooKeeper): a tree of small documents with versions.

Every change is a compare-and-set on a version, or a transaction of several of them. An *ephemeral* node is deleted when
the coordinator session of its creator ends. `waltzd.cluster.memory` and `waltzd.cluster.zookeeper` implement this interface
and pass the same contract tests. Paths are absolute within the cluster's root, like "/servers/one".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias

from waltzd.errors import TooLarge

COMMIT_BYTES_MAX = 1_000_000
"""Bytes of data in one commit at most: ZooKeeper drops the connection of a client that sends more than a mebibyte."""


@dataclass(frozen=True)
class Node:
    data: bytes
    version: int
    created: int
    """Identity of the node: a node that was deleted and created again under the same path has another value."""
    is_mine: bool
    """Whether the node is ephemeral and was created by this coordinator session."""


@dataclass(frozen=True)
class Create:
    path: str
    data: bytes
    ephemeral: bool = False


@dataclass(frozen=True)
class Set:
    path: str
    data: bytes
    version: int


@dataclass(frozen=True)
class Delete:
    path: str
    version: int


@dataclass(frozen=True)
class Check:
    """A condition without a change: the transaction fails unless the node has this version."""

    path: str
    version: int


Change: TypeAlias = Create | Set | Delete | Check


class Coordinator(Protocol):
    """A connection to the coordinator. Calls raise `CannotConnect` on a time-out; their outcome is then unknown."""

    @property
    def is_connected(self) -> bool:
        """True while the coordinator answers. After contact is lost, earlier reads may be stale."""
        ...

    @property
    def session(self) -> int:
        """Number of the coordinator session. It rises when a session is lost, and with it its ephemeral nodes."""
        ...

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` on the loop whenever `is_connected` or `session` changes; return a function that removes it."""
        ...

    async def get(self, path: str) -> Node | None:
        """Return the node; None if there is none."""
        ...

    async def children(self, path: str) -> list[str]:
        """Return the sorted names of the nodes below; empty if there is no such node."""
        ...

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make all changes or none. Parents of created nodes must exist, except those above the cluster's root.

        Raises:
            ChangedMeanwhile: A node has another version.
            NodeMissing: A node, or the parent of a created node, does not exist.
            NodeExists: A node to create exists already.
            TooLarge: The data exceeds `COMMIT_BYTES_MAX`.
        """
        ...

    @property
    def has_credentials(self) -> bool:
        """True if this process has sent credentials. Roots, and nodes below a closed root, that it creates belong to them:
        no other process can read or change these nodes."""
        ...

    async def is_open(self, path: str) -> bool:
        """Return whether a process without credentials may read or change this node; False if there is no node."""
        ...

    async def is_ours(self, path: str) -> bool:
        """Return whether this node belongs to the credentials of this process, and only they and their read-only names may
        read it; True if there is no node."""
        ...

    async def protect(self, path: str) -> None:
        """Close a node: give all rights to the credentials of this process, and none to other processes."""
        ...

    async def open_above(self) -> list[str]:
        """Return the nodes above the cluster's root, and those of ZooKeeper itself, in which any process may create nodes,
        or a process with a password that is being replaced."""
        ...

    async def close_above(self) -> list[str]:
        """Give the nodes that `open_above` returns to the credentials of this process, as far as ZooKeeper permits; return
        the nodes that were given. Any process may still list them."""
        ...

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        """Wait until anything at these paths (data, version, existence, names of children) differs from the state of the
        token `seen`, or the coordinator session changed; return the new token.

        With None, return a token at once. A change is never missed; the call may also return without one. With a token,
        a loss of contact does not end the call."""
        ...

    async def close(self) -> None:
        """End the coordinator session: its ephemeral nodes go at once."""
        ...


# -- what both implementations have in common --------------------------------------------------------------------------


def check_size(changes: Sequence[Change]) -> None:
    assert changes
    size = sum(len(change.data) for change in changes if isinstance(change, Create | Set))
    if size > COMMIT_BYTES_MAX:
        raise TooLarge(f"a change of {size} bytes is too much for the coordinator; {COMMIT_BYTES_MAX} are allowed")


class Watchers:
    """Listeners for changes of the contact, and tasks that wait for a change at some paths."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._numbers = count()
        self._waiting: dict[asyncio.Event, int] = {}
        """Number of each waiting task, by its event. They are woken in the order of their numbers."""
        self._by_path: dict[str, set[asyncio.Event]] = {}
        """Events of the tasks that wait for a path, by path: an owner of hundreds of partitions has as many tasks."""

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    @contextmanager
    def waiter(self, paths: Collection[str]) -> Iterator[asyncio.Event]:
        """Yield an event that is set when one of these paths may have changed, or the contact changed."""
        woken, wanted = asyncio.Event(), frozenset(paths)
        self._waiting[woken] = next(self._numbers)
        for path in wanted:
            self._by_path.setdefault(path, set()).add(woken)
        try:
            yield woken
        finally:
            del self._waiting[woken]
            for path in wanted:
                self._by_path[path].remove(woken)
                if not self._by_path[path]:
                    del self._by_path[path]

    def wake(self, paths: Collection[str] | None = None) -> None:
        """Wake the tasks that wait for one of these paths; without paths, all tasks."""
        found = self._waiting if paths is None else {one for path in paths for one in self._by_path.get(path, ())}
        for woken in sorted(found, key=self._waiting.__getitem__):
            woken.set()
