"""The coordinator (ZooKeeper) as Waltz uses it: a tree of small documents with versions.

Every change is a compare-and-set on a version, or a transaction of several of them. An *ephemeral* node goes away with
the coordinator session of its creator. Two implementations pass the same contract tests: `waltzd.cluster.memory` and
`waltzd.cluster.zookeeper`. Paths are absolute within the cluster's root, like "/servers/one".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from waltzd.errors import TooLarge

COMMIT_BYTES_MAX = 1_000_000
"""What one commit may carry: ZooKeeper drops the connection of a client that sends more than a mebibyte."""


@dataclass(frozen=True)
class Node:
    data: bytes
    version: int
    created: int
    """Tells a node from another one that was created later under the same path."""
    is_mine: bool
    """Ephemeral, and of this coordinator session."""


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
    """Changes nothing; the transaction fails unless the node has this version."""

    path: str
    version: int


Change: TypeAlias = Create | Set | Delete | Check


class Coordinator(Protocol):
    """All calls raise `CannotConnect` when the coordinator does not answer in time: the outcome is then unknown."""

    @property
    def is_connected(self) -> bool:
        """False from the moment contact is lost. What was read last may be old then."""
        ...

    @property
    def session(self) -> int:
        """Rises whenever the coordinator session was lost and a new one began: ephemeral nodes of the old one are gone."""
        ...

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` on the loop whenever `is_connected` or `session` changed; returns how to stop that."""
        ...

    async def get(self, path: str) -> Node | None: ...
    async def children(self, path: str) -> list[str]:
        """Names, sorted; empty when there is no such node."""
        ...

    async def commit(self, changes: Sequence[Change]) -> None:
        """All of them or none. Parents of created nodes must exist, except those above the cluster's root. Raises
        `ChangedMeanwhile`, `NodeMissing` or `NodeExists` when a condition does not hold, `TooLarge` above
        `COMMIT_BYTES_MAX`."""
        ...

    @property
    def has_credentials(self) -> bool:
        """This process has shown credentials. What it creates below a closed root, and a root, belongs to them: the
        coordinator lets nobody else read or change it."""
        ...

    async def is_open(self, path: str) -> bool:
        """Whether a process without credentials may do something with this node; False when there is none."""
        ...

    async def is_ours(self, path: str) -> bool:
        """Whether this node belongs to the credentials of this process, and only those that it names may read it; True
        when there is none."""
        ...

    async def protect(self, path: str) -> None:
        """Close a node: give it to the credentials of this process, and nothing to anybody else."""
        ...

    async def open_above(self) -> list[str]:
        """The nodes above the cluster's root and beside it in which everybody may create nodes, or those who have a
        password of ours that is being replaced."""
        ...

    async def close_above(self) -> list[str]:
        """Give what `open_above` finds to the credentials of this process, as far as they may; return what was given.
        Everybody may still read the names there."""
        ...

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        """Return when anything at these paths (data, version, existence, names of children) differs from what the token
        `seen` stands for, or the coordinator session changed; the new token. With None, return a token at once. Never
        misses a change, may return without one. With a token, it outlasts a loss of contact."""
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
    """Listeners of the contact, and tasks that wait for a change at some paths."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._waiting: dict[asyncio.Event, frozenset[str]] = {}

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    @contextmanager
    def waiter(self, paths: Collection[str]) -> Iterator[asyncio.Event]:
        """Set when one of these paths may have changed, or contact did."""
        woken = asyncio.Event()
        self._waiting[woken] = frozenset(paths)
        try:
            yield woken
        finally:
            del self._waiting[woken]

    def wake(self, paths: Collection[str] | None = None) -> None:
        """Without paths: all that wait."""
        for woken, wanted in self._waiting.items():
            if paths is None or not wanted.isdisjoint(paths):
                woken.set()
