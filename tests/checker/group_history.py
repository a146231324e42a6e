"""What members and operators of a consumer group did and were told, as lines of JSON: the evidence about one group.

Each process appends to a file of its own. Times are nanoseconds of one monotonic clock for all of them, and no two lines of
one process have the same; `group_verdict` relies on nothing else. A *holder* is one life of a member: after a crash, a
reconnection or a fail-over it is another one, also under the same name. Lines by their `type`:

    delivered  at holder partition epoch tag id attempt name header size
               the application was given it; `name` is the transaction's own name, which stands in its payload
    said       at number holder partition epoch tag id verb stands_in
               the application says of the delivery with this epoch and tag: ack, nack or reject; `stands_in` is the epoch
               in which its stream joined
    answered   at number answer
               taken, done, late, unknown, old, as the owner said; what has no such line may have been any of them
    kept       number
               it was told that what it said is on the disks of a majority
    changed    at returned verb partition ids up_to epoch
               an operator's replay, discard, skip (up to an id) or reset (behind an id); `returned` is null, and `epoch` 0,
               where nobody knows what came of it
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.checker.history import BadHistory
from waltzd.protocol.groups import Exhausted, Mode


@dataclass(slots=True)
class Delivered:
    at: int
    holder: str
    partition: int
    epoch: int
    tag: int
    id: int
    attempt: int
    name: str
    header: int = 0
    size: int = 0
    """Bytes of its payload."""


@dataclass(slots=True)
class Said:
    at: int
    number: str
    """Unique among all that is said."""
    holder: str
    partition: int
    epoch: int
    tag: int
    id: int
    verb: str
    stands_in: int
    answer: str = ""
    """Empty: nobody knows."""
    returned: int | None = None
    is_kept: bool = False


@dataclass(slots=True)
class Changed:
    at: int
    verb: str
    partition: int
    ids: tuple[int, ...] = ()
    """Of a replay or a discarding."""
    up_to: int = -1
    """Of a skip, the last id that is not done; of a reset, the id behind which the group begins."""
    returned: int | None = None
    epoch: int = 0
    """Of the group in this partition when it was done."""


@dataclass(slots=True)
class Written:
    """A transaction as it stands in the log."""

    name: str
    header: int = 0
    key: str | None = None
    """By which a keyed group orders."""


@dataclass(slots=True)
class Standing:
    """Where the group stands in a partition in the end, by its owner's word."""

    floor: int
    stopped: str = ""
    parked: dict[int, int] = field(default_factory=dict)
    """Ids, each with how often it failed."""
    is_removed: bool = False
    """The group was removed: nobody knows what it had parked."""


@dataclass
class GroupHistory:
    mode: Mode
    room: int = 100
    deliver_max: int = 5
    exhausted: Exhausted = Exhausted.PARK
    headers: tuple[int, ...] = ()
    """What its filter wants; empty: all."""
    starts: dict[int, int] = field(default_factory=dict)
    """Behind which id it begins in a partition; from the first on where nothing is said."""
    window: int | None = None
    """For so long at most what was answered is only in the memory of an owner, while the group log is well. None: it was
    not always well, and nothing is asked for."""
    outages: list[tuple[int, int]] = field(default_factory=list)
    """From when until when the group log could not be written, without overlap: that time does not count."""
    delivered: list[Delivered] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    log: dict[int, dict[int, Written]] = field(default_factory=dict)
    """By partition and id: what is committed in the end, without probes."""
    firsts: dict[int, int] = field(default_factory=dict)
    """The first id that a partition still has, where it has lost some."""
    standings: dict[int, Standing] = field(default_factory=dict)

    def is_wanted(self, written: Written) -> bool:
        return not self.headers or written.header in self.headers

    def load(self, paths: Iterable[Path]) -> None:
        """What members and operators wrote down. The last line of a file may be cut short: its process was killed."""
        later: dict[str, list[dict[str, Any]]] = {"answered": [], "kept": []}
        for path in sorted(paths):
            lines = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines, 1):
                if not line:
                    continue
                try:
                    self._take(json.loads(line), later)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    if number < len(lines):
                        raise BadHistory(f"{path.name}, line {number}: {error!r} in {line[:200]!r}") from error
        by_number = {one.number: one for one in self.said}
        if len(by_number) < len(self.said):
            raise BadHistory("two things that were said have one number")
        try:
            for fields in later["answered"]:
                one = by_number[fields["number"]]
                one.answer, one.returned = fields["answer"], fields["at"]
            for fields in later["kept"]:
                by_number[fields["number"]].is_kept = True
        except KeyError as error:
            raise BadHistory(f"an answer to what nobody said: {error}") from error

    def _take(self, fields: dict[str, Any], later: dict[str, list[dict[str, Any]]]) -> None:
        match fields.pop("type"):
            case "delivered":
                self.delivered.append(Delivered(**fields))
            case "said":
                self.said.append(Said(**fields))
            case "changed":
                self.changed.append(Changed(**fields | {"ids": tuple(fields["ids"])}))
            case "answered" | "kept" as kind:
                later[kind].append(fields)
            case other:
                raise BadHistory(f"no such type of line: {other}")


class GroupWriter:
    """Appends lines to one file, each before the call returns."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def _write(self, type: str, fields: dict[str, object]) -> None:
        self._file.write(json.dumps({"type": type, **fields}, separators=(",", ":")) + "\n")
        self._file.flush()

    def delivered(self, one: Delivered) -> None:
        self._write("delivered", asdict(one))

    def said(self, one: Said) -> None:
        fields = asdict(one)
        for name in ("answer", "returned", "is_kept"):
            del fields[name]
        self._write("said", fields)

    def answered(self, one: Said) -> None:
        self._write("answered", {"at": one.returned, "number": one.number, "answer": one.answer})

    def kept(self, one: Said) -> None:
        self._write("kept", {"number": one.number})

    def changed(self, one: Changed) -> None:
        self._write("changed", asdict(one))
