"""Servers that are treated as dead before their coordinator session ends. Pure: the time is an argument.

A process that was killed stays in the list of servers until its coordinator session ends. It is suspected earlier when
two facts agree. First, nothing listens at its port: the port refuses connections (silence proves nothing). Second, for
each partition that it owns a majority of the members reports that no append stream exists. A broken network between two
machines can cause one of the two alone. Sessions fence, so a wrong suspicion costs a hand-over and never a transaction.
Suspicions of one process are rare (`REST_SECONDS`), so that an unstable network cannot move partitions back and forth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

REST_SECONDS = 60.0
"""Minimum time between two suspicions of one process."""


@dataclass(frozen=True)
class Suspicion:
    instance: UUID
    since: float
    why: str


def silent_everywhere(members: Mapping[int, Collection[str]], quiet: Mapping[str, Collection[int]]) -> bool:
    """Return whether for each partition a majority of its members reports that no append stream exists. A storage that
    does not answer, or does not support the question, does not count."""
    return all(
        2 * sum(partition in quiet.get(name, ()) for name in names) > len(names) for partition, names in members.items()
    )


class Suspicions:
    """Suspicions of one server about all other servers."""

    def __init__(self) -> None:
        self.suspected: dict[str, Suspicion] = {}
        self._last: dict[UUID, float] = {}
        """Process to the time of its newest suspicion."""

    def seen(self, servers: Mapping[str, UUID]) -> bool:
        """Drop the suspicions of processes that are not in this list of servers; return whether there were any."""
        over = [name for name, held in self.suspected.items() if servers.get(name) != held.instance]
        for name in over:
            del self.suspected[name]
        return bool(over)

    def answered(self, name: str) -> bool:
        """Drop the suspicion of a server that listens after all; return whether there was one."""
        return self.suspected.pop(name, None) is not None

    def may_suspect(self, name: str, instance: UUID, now: float) -> bool:
        last = self._last.get(instance)
        return name not in self.suspected and (last is None or now - last >= REST_SECONDS)

    def judge(
        self,
        name: str,
        instance: UUID,
        now: float,
        *,
        refuses: bool,
        members: Mapping[int, Collection[str]],
        quiet: Mapping[str, Collection[int]],
    ) -> bool:
        """Decide whether a server is suspected from now on. `members`: members of each partition that it owns.
        `quiet`: for each storage, the partitions for which it reports that no append stream exists."""
        if not (refuses and self.may_suspect(name, instance, now) and silent_everywhere(members, quiet)):
            return False
        for old in [old for old, last in self._last.items() if now - last >= REST_SECONDS]:
            del self._last[old]
        self._last[instance] = now
        why = "nothing listens at its port"
        if members:
            why += f", and a majority of the storages of its {len(members)} partitions reports that its streams have ended"
        self.suspected[name] = Suspicion(instance, now, why)
        return True
