"""The audit log of a daemon: what one line says, how lines are chained, and how refusals are counted. Pure.

A line says who asked for what, and whether that was done or refused: never a payload, never a secret. Each line names the
SHA-256 of the line in front of it. Whoever changes, takes out or puts in a line has to write every later line anew, and
then the hash of the last line, the *head*, is another one. A head that was logged elsewhere proves the lines up to it. The
chain alone does not show that its newest lines were cut off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

ANONYMOUS = "anonymous"
"""A caller without a certificate."""
NOBODY = ""
"""Of lines that the daemon writes about itself."""
START = "0" * 64
"""The hash that the first line of all names."""
ABOUT_CHARACTERS_MAX = 400
MINUTE_MS = 60_000
NAMES_MAX = 1024
"""RefusalCounter are counted apart for so many callers, calls and codes."""
OTHERS = "others"
BEGAN, ENDED, LOST = "audit/begin", "audit/end", "audit/lost"
"""Lines of the daemon about its log: the process began or ended, or lines could not be written."""


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """What was asked of a daemon, and what became of it."""

    who: str
    """The URI in the caller's certificate."""
    peer: str
    """Its address."""
    what: str
    """The call, as in `StorageAdmin/RemovePartitions`."""
    partitions: str = ""
    """As in 0-3,7."""
    about: str = ""
    """The arguments that matter, as in `files=deleted`."""
    code: str | None = None
    """Of the error with which it was refused; None: it was done."""
    times: int = 1
    """How many refusals the line stands for."""


class Auditor(Protocol):
    def note(self, deed: AuditRecord) -> None: ...


class NoAudit:
    """For a daemon without an audit log, as in tests."""

    def note(self, deed: AuditRecord) -> None:
        pass


NO_AUDIT = NoAudit()


def spans(numbers: Iterable[int]) -> str:
    """Partitions in a few characters, as in 0-3,7."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return shortened(",".join(str(low) if low == high else f"{low}-{high}" for low, high in found))


def shortened(text: str) -> str:
    """A caller chooses what it says, and must not choose how much of it is kept."""
    return text if len(text) <= ABOUT_CHARACTERS_MAX else f"{text[:ABOUT_CHARACTERS_MAX]}…"


# -- the chain ---------------------------------------------------------------------------------------------------------


def encode(deed: AuditRecord, *, time_ms: int, before: str) -> str:
    """Return a line of the file, without its end. `before`: the hash of the line in front of it."""
    content = {
        "time_ms": time_ms,
        "who": deed.who,
        "peer": deed.peer,
        "what": deed.what,
        "partitions": deed.partitions,
        "about": deed.about,
        "result": "done" if deed.code is None else "refused",
        "code": deed.code,
        "times": deed.times,
        "before": before,
    }
    return json.dumps(content, separators=(",", ":"))


def hash_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


# -- refusals ----------------------------------------------------------------------------------------------------------


class RefusalCounter:
    """Counts what callers are refused. The first of a kind is told at once; those that follow within a minute are told when
    it is over, as one. So a caller that tries without end writes two lines a minute."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, str | None], tuple[int, AuditRecord, int]] = {}
        """When its minute is over, the newest, and how many were not told yet."""

    def record(self, deed: AuditRecord, now_ms: int) -> list[AuditRecord]:
        """What is to be written now."""
        found = self.expired(now_ms)
        key = deed.who, deed.what, deed.code
        if key not in self._counted and len(self._counted) >= NAMES_MAX:
            deed = replace(deed, who=OTHERS, what=OTHERS, partitions="", about="")
            key = OTHERS, OTHERS, deed.code
        if key not in self._counted:
            self._counted[key] = now_ms + MINUTE_MS, deed, 0
            return [*found, deed]
        ends, _, times = self._counted[key]
        self._counted[key] = ends, deed, times + 1
        return found

    def expired(self, now_ms: int, *, is_end: bool = False) -> list[AuditRecord]:
        """Counts whose minute is over; of the end, all of them."""
        ended = [key for key, (ends, _, _) in self._counted.items() if is_end or ends <= now_ms]
        found = [self._counted.pop(key) for key in ended]
        return [replace(deed, partitions="", about="", times=times) for _, deed, times in found if times]
