"""Alarms in the log of a daemon: an error when a trouble begins, a reminder while it lasts, and a line when it ends.
Pure: the daemon passes the current troubles, and logs the lines that are returned.

A trouble is logged once, however often it is reported, and the same trouble of several partitions becomes one line. A
trouble that ends within its patience is not logged at all: a fail-over closes partitions for a moment, and is no alarm."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from waltzd.cluster.assignment import format_numbers
from waltzd.errors.operations import Diverged
from waltzd.protocol.descriptions import DIVERGED, OwnedPartition

LOOK_SECONDS = 2.0
AGAIN_SECONDS = 600.0
CLOSED_PATIENCE_SECONDS = 3.0
DAMAGED_PATIENCE_SECONDS = 15.0
"""Seconds until damage is an alarm. Damage is also logged when it is found; the alarm is for damage that stays."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    kind: str
    """Description that follows the partition in a line, as in "no transactions are taken"."""
    why: str
    """Reason."""
    code: str
    patience: float
    """Seconds for which it is not logged."""


@dataclass(frozen=True)
class Said:
    level: int
    text: str
    code: str


@dataclass
class _Known:
    trouble: Trouble
    since: float
    told: float | None = None


class Alarms:
    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Known] = {}

    def look(self, now: float, troubles: Mapping[int, Iterable[Trouble]]) -> list[Said]:
        """Return the lines to log now, given all current troubles by partition."""
        seen = {(number, trouble.kind): trouble for number, those in troubles.items() for trouble in those}
        over = {key: known for key, known in self._known.items() if key not in seen}
        for key in over:
            del self._known[key]
        due: dict[tuple[int, str], _Known] = {}
        for key, trouble in seen.items():
            known = self._known.setdefault(key, _Known(trouble, now))
            known.trouble = trouble
            owed = known.since + trouble.patience if known.told is None else known.told + AGAIN_SECONDS
            if now >= owed:
                known.told = now
                due[key] = known
        told_and_over = {key: known for key, known in over.items() if known.told is not None}
        return [
            *(_said(logging.ERROR, kind, numbers, known, now, "") for kind, numbers, known in _grouped(due)),
            *(_said(logging.INFO, kind, numbers, known, now, "over: ") for kind, numbers, known in _grouped(told_and_over)),
        ]


def _grouped(found: Mapping[tuple[int, str], _Known]) -> list[tuple[str, list[int], _Known]]:
    """Group troubles by kind; return the partitions of each kind, with its oldest trouble."""
    kinds: dict[str, list[int]] = {}
    for number, kind in sorted(found):
        kinds.setdefault(kind, []).append(number)
    return [
        (kind, numbers, min((found[number, kind] for number in numbers), key=lambda known: known.since))
        for kind, numbers in kinds.items()
    ]


def _said(level: int, kind: str, numbers: list[int], known: _Known, now: float, head: str) -> Said:
    trouble, noun = known.trouble, "partition" if len(numbers) == 1 else "partitions"
    lasted = round(now - known.since)
    length = f"{lasted} seconds" if lasted < 120 else f"{lasted // 60} minutes"
    what = f"{head}{noun} {format_numbers(numbers)}: {kind}"
    if level == logging.INFO:
        return Said(level, f"{what}; it lasted {length}", trouble.code)
    return Said(level, f"{trouble.code} {what}, for {length} now: {trouble.why}", trouble.code)


# -- what is wrong -----------------------------------------------------------------------------------------------------


def of_server(partitions: Iterable[OwnedPartition], code: str) -> dict[int, list[Trouble]]:
    """Return the troubles of a server: partitions that accept no transactions, because they are not open or have no
    majority that accepts appends, and replicas that hold another history than the log."""
    return {owned.partition: [*_closed(owned, code), *_diverged(owned)] for owned in partitions}


def _closed(owned: OwnedPartition, code: str) -> Iterator[Trouble]:
    if owned.step != "OPEN" or owned.waiting:
        yield Trouble(
            kind="no transactions are taken",
            why=f"{owned.step}, {owned.waiting or 'it is being opened'}",
            code=code,
            patience=CLOSED_PATIENCE_SECONDS,
        )


def _diverged(owned: OwnedPartition) -> Iterator[Trouble]:
    for replica in owned.replicas:
        if replica.state == DIVERGED:
            yield Trouble(
                kind=f"the replica on {replica.storage} holds another history than the log and is out",
                why=f"{replica.story}; find out who wrote there, then `waltzctl storage recover {replica.storage}`",
                code=Diverged.code,
                patience=0.0,
            )


def of_replica(*, damage: str | None, refused: str | None, code: str) -> list[Trouble]:
    """Return the troubles of one replica on a storage."""
    if refused is not None:
        return [Trouble(kind="its files are refused", why=refused, code=code, patience=0.0)]
    if damage is not None:
        return [Trouble(kind="damaged, and not healed", why=damage, code=code, patience=DAMAGED_PATIENCE_SECONDS)]
    return []


def log_all(log: logging.Logger, found: Iterable[Said]) -> None:
    for said in found:
        log.log(said.level, "%s", said.text, extra={"code": said.code})
