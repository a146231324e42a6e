"""Whether replicas hold the same records, and where they differ first: found by asking for hashes, never for records. Pure.

`comparison` is a conversation: it asks for the digests of a range on some replicas, is told them, and asks on. Most ranges
are the same everywhere. Where one is not, the largest group that agrees goes on, and each other replica is bisected against
it: of two halves the first that differs holds the first difference, so a range of n ids takes log2 n questions. An answer
may stop short of the range; the rest is asked for next.

A replica is asked up to its own mark. One that does not answer is unknown from there on, and never taken for the same.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from waltzd.cluster.documents import Membership
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL, WaltzError
from waltzd.format.digest import Digest
from waltzd.format.record import Record


class Verdict(enum.Enum):
    SAME = "same"
    """As others, up to where it was compared."""
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """It could not be asked, or there was no other replica to compare it with."""


@dataclass(frozen=True)
class Question:
    replicas: tuple[str, ...]
    first_id: int
    last_id: int


Answers: TypeAlias = Mapping[str, Digest | WaltzError]
Asking: TypeAlias = Generator[Question, Answers, "_Level"]


@dataclass(kw_only=True)
class Standing:
    """What is known of one replica."""

    mark: int
    """Up to here it can be asked."""
    compared: int = -1
    """Up to here it is the same as the others that were compared with it."""
    verdict: Verdict = Verdict.UNKNOWN
    difference: tuple[int, int] | None = None
    """The first id that differs; a range when a replica stopped answering before it was found."""
    error: WaltzError | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One replica in the result."""

    storage: str
    role: Membership | None
    standing: Standing
    last_id: int | None
    """What it holds, committed or not; None when that is not known."""
    behind: int | None
    """So many committed ids are missing."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    partition: int
    committed: int
    """As the owner says; without one, what the replicas know."""
    replicas: tuple[Compared, ...]
    differing: Mapping[int, Mapping[str, Record | WaltzError]]
    """The first records that differ, as the replicas hold them."""
    exchanges: int
    hashed_bytes: int

    @property
    def exit_code(self) -> int:
        verdicts = [replica.standing.verdict for replica in self.replicas]
        if Verdict.DIFFERENT in verdicts:
            return EXIT_FINDINGS
        return EXIT_PARTIAL if Verdict.UNKNOWN in verdicts else EXIT_OK


@dataclass(frozen=True)
class _Level:
    """Digests of one range, the same range for all."""

    last_id: int
    hashes: dict[str, bytes]
    errors: dict[str, WaltzError]


def comparison(marks: Mapping[str, int]) -> Generator[Question, Answers, dict[str, Standing]]:
    """`marks`: the replicas and how far each can be asked; -1 for one that is empty."""
    standings = {name: Standing(mark=mark) for name, mark in sorted(marks.items())}
    asked = list(standings)
    at = 0
    while True:
        for name in [name for name in asked if standings[name].mark < at]:
            standings[name].verdict = Verdict.SAME
            asked.remove(name)
        if len(asked) < 2:
            break
        found = yield from _level(asked, at, min(standings[name].mark for name in asked))
        for name, error in found.errors.items():
            standings[name].error = error
            asked.remove(name)
        if len(asked) < 2:
            break
        agreed = _agreed(found.hashes)
        is_majority = 2 * len(agreed) > len(asked)
        for name in [name for name in asked if name not in agreed]:
            difference, trouble = yield from _first_difference((agreed[0], name), at, found.last_id)
            standings[name].error = trouble
            _differs(standings[name], difference)
            asked.remove(name)
            if not is_majority:  # it cannot be told which of them is right
                for other in agreed:
                    before = standings[other].difference
                    _differs(standings[other], difference if before is None else min(before, difference))
        if not is_majority:
            asked = []
            break
        for name in agreed:
            standings[name].compared = found.last_id
        at = found.last_id + 1
    for name in asked:  # no other replica is left to compare it with
        standings[name].verdict = Verdict.SAME if standings[name].compared >= 0 else Verdict.UNKNOWN
    return standings


def _differs(standing: Standing, difference: tuple[int, int]) -> None:
    standing.verdict, standing.difference, standing.compared = Verdict.DIFFERENT, difference, difference[0] - 1


def _agreed(hashes: Mapping[str, bytes]) -> list[str]:
    """The largest group of those that hold the same; of equal ones the first by name."""
    groups: dict[bytes, list[str]] = {}
    for name, hash_ in sorted(hashes.items()):
        groups.setdefault(hash_, []).append(name)
    return max(groups.values(), key=len)


def _level(replicas: Sequence[str], first_id: int, last_id: int) -> Asking:
    """Digests of the longest range from `first_id` on that every answering replica has hashed."""
    digests: dict[str, Digest] = {}
    errors: dict[str, WaltzError] = {}
    asked = tuple(replicas)
    while asked:
        answers = yield Question(asked, first_id, last_id)
        for name in asked:
            answer = answers[name]
            if isinstance(answer, WaltzError):
                errors[name] = answer
                digests.pop(name, None)
            else:
                assert first_id <= answer.last_id <= last_id
                digests[name] = answer
        last_id = min((digest.last_id for digest in digests.values()), default=last_id)
        asked = tuple(name for name, digest in digests.items() if digest.last_id > last_id)
    return _Level(last_id, {name: digest.hash for name, digest in digests.items()}, errors)


def _first_difference(
    pair: tuple[str, str], first_id: int, last_id: int
) -> Generator[Question, Answers, tuple[tuple[int, int], WaltzError | None]]:
    """The two differ somewhere in this range, and everything in front of it is the same."""
    while first_id < last_id:
        found = yield from _level(pair, first_id, (first_id + last_id) // 2)
        if found.errors:
            return (first_id, last_id), found.errors.get(pair[1], next(iter(found.errors.values())))
        if len(set(found.hashes.values())) == 1:
            first_id = found.last_id + 1
        else:
            last_id = found.last_id
    return (first_id, last_id), None
