"""Who uploads the next segment of a partition, and when: the replicas take turns, and what fails waits longer each time.

Nothing of the log depends on an upload. So there is one at a time, nothing is hurried, and a replica that cannot is only
asked last. Pure: the shell is `waltzd.server.session.archiving`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TURN_SEGMENTS = 8
"""So many in a row by one replica: it has the newest manifest in memory then."""
IDLE_SECONDS = 5.0
"""Until the next look whether a segment is sealed."""
LOOKS = 12
"""While nothing is committed there is nothing to ask for, but what a replica may have learned meanwhile: so seldom."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0


@dataclass
class Turns:
    """`pause` says how long to wait before the next question."""

    trouble: str = ""
    """Why it does not go on; empty while it does."""
    pause: float = 0.0
    _order: list[str] = field(default_factory=list)
    """The first that is able is asked next."""
    _left: int = TURN_SEGMENTS
    _retry: float = RETRY_SECONDS
    _nothing: dict[str, int] = field(default_factory=dict)
    """What was committed when a replica had no segment for the archive."""
    _looks: int = 0
    _failed: dict[str, None] = field(default_factory=dict)
    """Those that failed since the last upload or pause."""

    def choose(self, able: Sequence[str], committed: int) -> str | None:
        """Whom to ask, of those that can upload; None to wait and look again."""
        self._order += [name for name in able if name not in self._order]
        name = next((name for name in self._order if name in able and name not in self._failed), None)
        if name is not None and self._nothing.get(name) == committed and self._looks < LOOKS:
            name = None
        self._looks = 0 if name is not None else self._looks + 1
        if name is None:
            self.pause = IDLE_SECONDS
        return name

    def hurry(self) -> None:
        """A segment is known to wait: who had none before is asked again."""
        self._nothing.clear()

    def uploaded(self, name: str) -> None:
        self.trouble, self.pause, self._retry = "", 0.0, RETRY_SECONDS
        self._failed.clear()
        self._left -= 1
        if self._left <= 0:
            self._pass_on(name)

    def found_none(self, name: str, committed: int) -> None:
        """No segment is sealed there yet that is known to be committed. Another replica may be further."""
        self.trouble, self.pause = "", IDLE_SECONDS
        self._nothing[name] = committed
        self._failed.clear()
        self._pass_on(name)

    def failed(self, name: str, why: str, able: Sequence[str]) -> None:
        """The other replicas are asked at once, and then there is a pause."""
        self._failed[name] = None
        self._pass_on(name)
        self.pause = 0.0
        if all(other in self._failed for other in able):
            self.trouble = f"{name}: {why}"
            self.pause, self._retry = self._retry, min(2 * self._retry, RETRY_SECONDS_MAX)
            self._failed.clear()

    def _pass_on(self, name: str) -> None:
        self._left = TURN_SEGMENTS
        if name in self._order:
            self._order.remove(name)
        self._order.append(name)
