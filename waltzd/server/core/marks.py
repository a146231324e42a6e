"""What is committed in one open session: the highest mark that a majority of its members has on disk. Pure.

Rule 1: only members that the saved metadata says have joined are counted, and the majority is that of all members.
Rule 2: the committed mark only rises, whatever a replica says later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from waltzd.protocol.quorum import majority, reached


class Session:
    def __init__(self, members: Sequence[str], joined: Sequence[str], low_mark: int) -> None:
        assert members
        self.members = tuple(members)
        self.committed = low_mark
        self._durable = dict.fromkeys(joined, low_mark)
        self.marks = dict(self._durable)
        """The most that each ever acknowledged while it counted: who then holds less has forgotten it."""
        assert set(self._durable) <= set(members)

    @property
    def counted(self) -> tuple[str, ...]:
        """Whose acknowledgements count."""
        return tuple(self._durable)

    def durable(self, name: str) -> int | None:
        """How far this member is known to have everything on disk; None when it does not count."""
        return self._durable.get(name)

    def missing(self, readable: Collection[str]) -> str:
        """Why nothing can be committed with these replicas, in one sentence; empty when it can."""
        writable = [name for name in self._durable if name in readable]
        if len(writable) >= majority(len(self.members)):
            return ""
        others = [name for name in self.members if name not in writable]
        return f"no majority takes appends: {', '.join(others)} of {', '.join(self.members)} do not"

    def join(self, name: str, mark: int) -> bool:
        """Saved: it counts from now on, and has this much on disk. True when the committed mark rose."""
        assert name in self.members
        self._durable[name] = mark
        self.marks[name] = max(mark, self.marks.get(name, mark))
        return self._commit()

    def lose(self, name: str) -> None:
        """It has forgotten something: nothing that it says counts any more."""
        self._durable.pop(name, None)

    def acknowledge(self, name: str, mark: int) -> bool:
        """It says that everything up to `mark` is on its disk. True when the committed mark rose."""
        before = self._durable.get(name)
        if before is None or mark <= before:
            return False
        self._durable[name] = mark
        self.marks[name] = max(mark, self.marks[name])
        return mark > self.committed and self._commit()

    def _commit(self) -> bool:
        mark = reached(self._durable.values(), len(self.members))
        if mark <= self.committed:
            return False
        self.committed = mark
        return True
