"""Which servers are taken for dead before the coordinator says so. Pure: the time is an argument.

A process that was killed keeps its place in the list of servers until its coordinator session ends. It is suspected earlier
when two things agree: nothing listens at its port (the port refuses; silence proves nothing), and of every partition that
it owns a majority of the members says that no append stream stands. Either alone may come from a broken way between two
machines. Sessions fence, so a wrong suspicion costs a hand-over and never a transaction; and there is one for each process
in so many seconds, so that a way that comes and goes cannot make partitions wander.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

REST_SECONDS = 60.0
"""Between two suspicions of one process."""


@dataclass(frozen=True)
class Suspicion:
    instance: UUID
    since: float
    why: str


def silent_everywhere(members: Mapping[int, Collection[str]], quiet: Mapping[str, Collection[int]]) -> bool:
    """Whether of each of these partitions a majority of the members says that no append stream stands. Who says nothing, or
    does not know the question, does not say so."""
    return all(
        2 * sum(partition in quiet.get(name, ()) for name in names) > len(names) for partition, names in members.items()
    )


class Suspicions:
    """Of one server about the others."""

    def __init__(self) -> None:
        self.suspected: dict[str, Suspicion] = {}
        self._last: dict[UUID, float] = {}
        """When each process was suspected last."""

    def seen(self, servers: Mapping[str, UUID]) -> bool:
        """These are in the list of servers. Who is gone, or was started again, is not suspected any more; whether that
        changed anything."""
        over = [name for name, held in self.suspected.items() if servers.get(name) != held.instance]
        for name in over:
            del self.suspected[name]
        return bool(over)

    def answered(self, name: str) -> bool:
        """It listens after all; whether it was suspected."""
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
        """Whether it is suspected from now on. `members`: of each partition that it owns; `quiet`: of which partitions each
        storage says that no append stream stands."""
        if not (refuses and self.may_suspect(name, instance, now) and silent_everywhere(members, quiet)):
            return False
        for old in [old for old, last in self._last.items() if now - last >= REST_SECONDS]:
            del self._last[old]
        self._last[instance] = now
        why = "nothing listens at its port"
        if members:
            why += f", and a majority of the storages of its {len(members)} partitions says that its streams have ended"
        self.suspected[name] = Suspicion(instance, now, why)
        return True
