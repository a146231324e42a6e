"""The audit log of a daemon: its records, their hash chain, and the counting of refusals. Pure.

A record names the caller, the call and its result, never a payload or a secret. Each line contains the SHA-256 of the line
before it. Changing, removing or inserting a line requires rewriting all later lines, which changes the hash of the last
line, the *head*. A head that was logged elsewhere proves the lines up to it. The chain alone does not show that the newest
lines were cut off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

ANONYMOUS = "anonymous"
"""Name of a caller without a certificate."""
NOBODY = ""
"""Caller in records that the daemon writes about itself."""
START = "0" * 64
"""Hash in the very first line, which has no line before it."""
ABOUT_CHARACTERS_MAX = 400
MINUTE_MS = 60_000
NAMES_MAX = 1024
"""Combinations of caller, call and code whose refusals are counted separately."""
OTHERS = "others"
BEGAN, ENDED, LOST = "audit/begin", "audit/end", "audit/lost"
"""Calls in records of the daemon about its log: the process began or ended, or records could not be written."""


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """One call to a daemon, and its result."""

    who: str
    """URI in the caller's certificate."""
    peer: str
    """Address of the caller."""
    what: str
    """Call, as in `StorageAdmin/RemovePartitions`."""
    partitions: str = ""
    """Partitions of the call, as in 0-3,7."""
    about: str = ""
    """Important arguments, as in `files=deleted`."""
    code: str | None = None
    """Code of the error that refused the call; None if the call was done."""
    times: int = 1
    """Number of refusals that the record stands for."""


class Auditor(Protocol):
    def note(self, deed: AuditRecord) -> None: ...


class NoAudit:
    """An auditor that records nothing, for daemons without an audit log, as in tests."""

    def note(self, deed: AuditRecord) -> None:
        pass


NO_AUDIT = NoAudit()


def spans(numbers: Iterable[int]) -> str:
    """Format partitions as ranges, as in 0-3,7."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return shortened(",".join(str(low) if low == high else f"{low}-{high}" for low, high in found))


def shortened(text: str) -> str:
    """Cut a text that a caller chose to `ABOUT_CHARACTERS_MAX`."""
    return text if len(text) <= ABOUT_CHARACTERS_MAX else f"{text[:ABOUT_CHARACTERS_MAX]}…"


# -- the chain ---------------------------------------------------------------------------------------------------------


def encode(deed: AuditRecord, *, time_ms: int, before: str) -> str:
    """Return a line of the file, without a line end. `before`: the hash of the line before it."""
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
    """A counter of refused calls by caller, call and code.

    The first refusal of a kind is recorded at once; further ones within a minute become one record when the minute has
    ended. So a caller in an endless loop causes two lines a minute."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, str | None], tuple[int, AuditRecord, int]] = {}
        """For each kind: the end of its minute, the newest refusal, and the number that are not recorded yet."""

    def record(self, deed: AuditRecord, now_ms: int) -> list[AuditRecord]:
        """Count a refusal; return the records that are to be written now. `now_ms`: milliseconds of a clock that never goes
        back."""
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
        """Return one record for each kind whose minute has ended; with `is_end`, for all kinds."""
        ended = [key for key, (ends, _, _) in self._counted.items() if is_end or ends <= now_ms]
        found = [self._counted.pop(key) for key in ended]
        return [replace(deed, partitions="", about="", times=times) for _, deed, times in found if times]
