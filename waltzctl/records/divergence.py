"""Find the first id at which replicas differ, by comparing digests of ranges. Pure.

`comparison` is a generator: it yields a `Question` for the digests of a range on some replicas, and is sent the answers.
Most ranges are equal everywhere. If one is not, the largest group of equal replicas continues, and each other replica is
bisected against it: the first differing half holds the first difference, so a range of n ids takes log2 n questions. An
answer may cover only the beginning of its range; the rest is asked next.

A replica is asked up to its own mark. A replica that does not answer is unknown from there on, and never counted as equal.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from waltzd.cluster.documents import Membership
from waltzd.errors import WaltzError
from waltzd.errors.exit_codes import EXIT_FINDINGS, EXIT_OK, EXIT_PARTIAL
from waltzd.format.digest import Digest
from waltzd.format.record import Record


class Verdict(enum.Enum):
    SAME = "same"
    """Equal to the other replicas, up to the last compared id."""
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """The replica did not answer, or there was no other one to compare it with."""


@dataclass(frozen=True)
class Question:
    replicas: tuple[str, ...]
    first_id: int
    last_id: int


Answers: TypeAlias = Mapping[str, Digest | WaltzError]
Asking: TypeAlias = Generator[Question, Answers, "_Level"]


@dataclass(kw_only=True)
class Standing:
    """State of the comparison of one replica."""

    mark: int
    """Last id for which the replica can be asked."""
    compared: int = -1
    """Last id up to which the replica equals the replicas that it was compared with."""
    verdict: Verdict = Verdict.UNKNOWN
    difference: tuple[int, int] | None = None
    """First differing id, twice; or the range that holds it, if a replica stopped answering before the id was found."""
    error: WaltzError | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One replica in the result."""

    storage: str
    role: Membership | None
    standing: Standing
    last_id: int | None
    """Last id of the replica, committed or not; None if unknown."""
    behind: int | None
    """Number of committed ids that are missing; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    partition: int
    committed: int
    """Last committed id, as reported by the owner, or else by the replicas."""
    replicas: tuple[Compared, ...]
    differing: Mapping[int, Mapping[str, Record | WaltzError]]
    """Id of a first difference → the record on each replica, or the error of reading it."""
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
    """Digests of one range on several replicas."""

    last_id: int
    hashes: dict[str, bytes]
    errors: dict[str, WaltzError]


def comparison(marks: Mapping[str, int]) -> Generator[Question, Answers, dict[str, Standing]]:
    """Compare replicas. `marks` is, for each, the last id for which it can be asked; -1 if it is empty."""
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
            if not is_majority:  # without a majority no one can tell which one is right
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
    """Return the largest group of replicas with equal digests; of groups of the same size the first by name."""
    groups: dict[bytes, list[str]] = {}
    for name, hash_ in sorted(hashes.items()):
        groups.setdefault(hash_, []).append(name)
    return max(groups.values(), key=len)


def _level(replicas: Sequence[str], first_id: int, last_id: int) -> Asking:
    """Return digests of the longest range from `first_id` on that every answering replica has hashed."""
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
    """Return the first differing id of two replicas that differ in this range and are equal in front of it."""
    while first_id < last_id:
        found = yield from _level(pair, first_id, (first_id + last_id) // 2)
        if found.errors:
            return (first_id, last_id), found.errors.get(pair[1], next(iter(found.errors.values())))
        if len(set(found.hashes.values())) == 1:
            first_id = found.last_id + 1
        else:
            last_id = found.last_id
    return (first_id, last_id), None
