"""The audit log of a daemon: what one line says, how the lines are chained, and how refusals are counted. Pure.

A line says who asked for what, and whether that was done or refused: never a payload, never a secret. Each line carries the
SHA-256 of itself, and of the line before it. Whoever changes, takes out or puts in a line has to write every later line
anew, and then the last hash, the *head*, is another one. A head that was told elsewhere before proves the lines up to it.
What a chain alone does not show is that its newest lines were cut off.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

ANONYMOUS = "anonymous"
"""A caller without a certificate."""
NOBODY = ""
"""Of lines that the daemon writes about itself."""
START = "0" * 64
"""What stands in front of the first line of all."""
ABOUT_CHARACTERS_MAX = 400
MINUTE_MS = 60_000
NAMES_MAX = 1024
"""Refusals are counted apart for so many callers, calls and codes."""
OTHERS = "others"
BEGAN, ENDED, LOST = "audit/begin", "audit/end", "audit/lost"
"""Lines of the daemon about its log: the process began or ended, or lines could not be written."""
_HASH = re.compile(r'(\{.*),"hash":"([0-9a-f]{64})"\}')


@dataclass(frozen=True, kw_only=True)
class Deed:
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
    def note(self, deed: Deed) -> None: ...


class Deaf:
    """For a daemon without an audit log, as in tests."""

    def note(self, deed: Deed) -> None:
        pass


DEAF = Deaf()


@dataclass(frozen=True, kw_only=True)
class AuditLine(Deed):
    number: int
    """Rises by one with each line of a daemon, over its restarts where it has a file."""
    time_ms: int


@dataclass(frozen=True, kw_only=True)
class AuditLines:
    head: str
    """The hash of the newest line in the file; empty where there is no file."""
    lines: tuple[AuditLine, ...]


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


def encode(line: AuditLine, before: str) -> tuple[str, str]:
    """The line as it stands in the file, without its end, and its hash."""
    content = {
        "number": line.number,
        "time_ms": line.time_ms,
        "who": line.who,
        "peer": line.peer,
        "what": line.what,
        "partitions": line.partitions,
        "about": line.about,
        "result": "done" if line.code is None else "refused",
        "code": line.code,
        "times": line.times,
        "before": before,
    }
    text = json.dumps(content, separators=(",", ":"))
    head = _hash(text)
    return f'{text[:-1]},"hash":"{head}"}}', head


def decode(text: str) -> tuple[AuditLine, str, str]:
    """The line, the hash of the line before it, and its own. ValueError when it is none, or its hash is another one."""
    found = _HASH.fullmatch(text)
    if found is None:
        raise ValueError("is no line of an audit log")
    body, head = found[1] + "}", found[2]
    if _hash(body) != head:
        raise ValueError("was changed: its hash is another one")
    try:
        said = json.loads(body)
        texts = {name: str(said[name]) for name in ("who", "peer", "what", "partitions", "about")}
        numbers = {name: int(said[name]) for name in ("number", "time_ms", "times")}
        code = None if said["code"] is None else str(said["code"])
        return AuditLine(code=code, **texts, **numbers), str(said["before"]), head  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError("is no line of an audit log") from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Break:
    """A place where a chain does not hold."""

    file: str
    line: int
    why: str


class Chain:
    """Follows the lines of one daemon, oldest first, through all of its files."""

    def __init__(self) -> None:
        self.lines = 0
        self.first: AuditLine | None = None
        self.last: AuditLine | None = None
        self.heads: set[str] = set()
        self.head = ""
        self.is_from_the_start = False
        """The first line of all is among them."""
        self.lost = 0
        """Lines that the daemon could not write, by its own word."""

    def follow(self, file: str, texts: Iterable[str]) -> Iterator[Break]:
        for number, text in enumerate(texts, 1):
            try:
                line, before, head = decode(text)
            except ValueError as error:
                yield Break(file=file, line=number, why=f"it {error}")
                self.head = ""
                continue
            if self.lines == 0:
                self.is_from_the_start = before == START
            elif self.head and before != self.head:
                yield Break(
                    file=file,
                    line=number,
                    why="it does not follow the line in front of it: lines were taken out or put in, or the files are in "
                    "another order",
                )
            self.first = self.first or line
            self.last, self.head = line, head
            self.lines += 1
            self.lost += line.times if line.what == LOST else 0
            self.heads.add(head)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Refusals:
    """Counts what callers are refused. The first of a kind is told at once; those that follow within a minute are told when
    it is over, as one. So a caller that tries without end writes two lines a minute."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, str | None], tuple[int, Deed, int]] = {}
        """When its minute is over, the newest, and how many were not told yet."""

    def told(self, deed: Deed, now_ms: int) -> list[Deed]:
        """What is to be written now."""
        found = self.over(now_ms)
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

    def over(self, now_ms: int, *, is_all: bool = False) -> list[Deed]:
        """Counts whose minute is over; of the end, all of them."""
        ended = [key for key, (ends, _, _) in self._counted.items() if is_all or ends <= now_ms]
        found = [self._counted.pop(key) for key in ended]
        return [replace(deed, partitions="", about="", times=times) for _, deed, times in found if times]
