"""Who uploads the next segment of a partition, and when: the replicas take turns, and what fails waits longer each time.
And when it is looked for what was uploaded before.

Nothing of the log depends on an upload. So there is one at a time, nothing is hurried, and a replica that cannot is only
asked last. Pure: the shell is `waltzd.server.session.archive_upload`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from waltzd.protocol.descriptions import ArchiveCheck

TURN_SEGMENTS = 8
"""So many in a row by one replica: it has the newest manifest in memory then."""
IDLE_SECONDS = 5.0
"""Until the next look whether a segment is sealed."""
LOOKS = 12
"""While nothing is committed there is nothing to ask for, but what a replica may have learned meanwhile: so seldom."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0
ROUND_SECONDS = 86_400.0
"""In which each object of an archive is looked for once."""
FIRST_SECONDS = 900.0
"""From the begin of a session on: an owner that has just got hundreds of partitions has other things to do."""
STEP_SECONDS, AGAIN_SECONDS = 1.0, 600.0


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


@dataclass
class Rounds:
    """When the objects of an archive are looked for, some at a time, from the first id to the last one: in the first round
    of a session one step after the other, and then so that a round takes a day. It stops at an object that is missing,
    until that is back. `pause` says how long to wait before the next step."""

    first_id: int = 0
    """From where on the next step looks."""
    last_id: int = -1
    """All objects up to this id were there, in this round or the one before."""
    missing: str = ""
    since: float | None = None
    """When the round began in which all were there; None before there was one, and from a missing object on."""
    pause: float = FIRST_SECONDS
    _began: float = 0.0

    def saw(self, found: ArchiveCheck, archived_id: int, asked: float) -> None:
        """What a step that was `asked` for at that moment has found, of what was archived up to `archived_id` then."""
        if self.first_id == 0:
            self._began = asked
        share = (found.last_id + 1 - self.first_id) / (archived_id + 1)
        self.first_id, self.missing = found.last_id + 1, found.missing
        if found.missing:
            self.last_id, self.since, self.pause = min(self.last_id, found.last_id), None, AGAIN_SECONDS
            return
        if self.first_id > archived_id:
            self.first_id, self.last_id, self.since = 0, archived_id, self._began
        self.pause = STEP_SECONDS if self.since is None else max(STEP_SECONDS, share * ROUND_SECONDS)

    def failed(self) -> None:
        """Nothing was learned, or nothing is archived yet."""
        self.pause = AGAIN_SECONDS

    def uploaded(self, before: int, last_id: int) -> None:
        """What was uploaded behind an id was read back then."""
        if self.since is not None and self.last_id == before:
            self.last_id = last_id

    def told(self, now: float) -> ArchiveCheck | None:
        if self.since is None and not self.missing:
            return None
        age_ms = None if self.since is None else int(1000 * (now - self.since))
        return ArchiveCheck(last_id=self.last_id, missing=self.missing, age_ms=age_ms)
