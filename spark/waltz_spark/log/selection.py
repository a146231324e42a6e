"""The selection of ids and partitions of a read: options in, spans out. Pure.

Options are named as in Spark's Kafka source, which users know: `startingTxnIds` is included, `endingTxnIds` is excluded,
and in JSON -2 stands for the earliest id and -1 for the latest. Selected ids that the log does not have are an error,
never fewer rows, unless `failOnDataLoss` is off. Times depend on the log: `timed` replaces them by ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from waltz_spark.log.origin import Catalog, Origin, Span
from waltzd.errors import BadArgument, BeyondLog, NoSuchPartition
from waltzd.format.layout import ID_MAX, PARTITIONS_MAX

STARTING, ENDING, PARTITIONS, FAIL_ON_DATA_LOSS = "startingTxnIds", "endingTxnIds", "partitions", "failOnDataLoss"
STARTING_TIME, ENDING_TIME = "startingTime", "endingTime"
OPTIONS = (STARTING, ENDING, STARTING_TIME, ENDING_TIME, PARTITIONS, FAIL_ON_DATA_LOSS)
LATEST, EARLIEST = -1, -2
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_NOT_READ = "nothing was read"
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A bound for each partition: an id, or `EARLIEST` or `LATEST` for those that are not named."""

    others: int
    named: Mapping[int, int] = field(default_factory=dict)

    def of(self, partition: int) -> int:
        return self.named.get(partition, self.others)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selected ids of a read or an export: `starting` is included, `ending` is not."""

    starting: Bound = Bound(others=EARLIEST)
    ending: Bound = Bound(others=LATEST)
    starting_time: int | None = None
    """Start in µs since 1970, in place of `starting`; None for none."""
    ending_time: int | None = None
    partitions: tuple[int, ...] | None = None
    """Selected partitions; None for all."""
    fails_on_loss: bool = True

    @property
    def has_times(self) -> bool:
        """True if times were selected: there may be no transaction between two times."""
        return self.starting_time is not None or self.ending_time is not None

    def timed(self, origin: Origin, catalog: Catalog) -> Selection:
        """Return the selection with ids in place of times."""
        wanted = [number for number in catalog.spans if self.partitions is None or number in self.partitions]

        def ids(time: int | None, bound: Bound) -> Bound:
            if time is None:
                return bound
            return Bound(others=bound.others, named={number: origin.first_at(catalog, number, time) for number in wanted})

        starting, ending = ids(self.starting_time, self.starting), ids(self.ending_time, self.ending)
        return replace(self, starting=starting, ending=ending)

    def spans(self, there: Mapping[int, Span]) -> dict[int, Span]:
        """Return the selected ids of each partition, in order; raise if ids are missing, unless losses are permitted."""
        wanted = sorted(there) if self.partitions is None else self.partitions
        missing = [number for number in wanted if number not in there]
        if missing:
            raise NoSuchPartition(f"{PARTITIONS}: there is no partition {_listed(missing)}", not_done=_NOT_READ)
        for name, bound in ((STARTING, self.starting), (ENDING, self.ending)):
            foreign = sorted(set(bound.named) - set(wanted))
            if foreign:
                raise NoSuchPartition(
                    f"{name} names partition {_listed(foreign)}, which is not read",
                    not_done=_NOT_READ,
                    next_step=f"leave it out of {name}, or name it in {PARTITIONS} if the log has it",
                )
        return {number: self._span(number, there[number]) for number in wanted}

    def passed_over(self, there: Mapping[int, Span]) -> list[str]:
        """Return a sentence for each partition with missing ids, for a warning with `failOnDataLoss=false`."""
        wanted = sorted(there) if self.partitions is None else self.partitions
        losses = (self._loss(number, there[number], *self._bounds(number, there[number])) for number in wanted)
        return [loss.message for loss in losses if loss is not None]

    def _bounds(self, number: int, there: Span) -> tuple[int, int]:
        first, end = self.starting.of(number), self.ending.of(number)
        first = {EARLIEST: there.first, LATEST: there.last + 1}.get(first, first)
        return first, end

    def _span(self, number: int, there: Span) -> Span:
        first, end = self._bounds(number, there)
        if LATEST != end < first:
            raise BadArgument(
                f"partition {number}: {ENDING} is {end}, which lies before {first}, where reading starts",
                not_done=_NOT_READ,
            )
        loss = self._loss(number, there, first, end)
        if self.fails_on_loss and loss is not None:
            raise loss
        found = Span(first, (there.last + 1 if end == LATEST else end) - 1).cut(there)
        return found if found.count else Span(max(found.first, there.first), max(found.first, there.first) - 1)

    @staticmethod
    def _loss(number: int, there: Span, first: int, end: int) -> BeyondLog | None:
        end = there.last + 1 if end == LATEST else end
        if first < there.first:
            last = min(end, there.first) - 1
            return BeyondLog(
                f"partition {number}: ids {first} to {last} are not there any more; the first id is {there.first}",
                not_done=_NOT_READ,
                next_step=f"start at {there.first}, or set {FAIL_ON_DATA_LOSS} to false to read what is left",
                first_id=first,
                last_id=last,
            )
        if max(first, end) > there.last + 1:
            what = f"{ENDING} is {end}" if end > there.last + 1 else f"{STARTING} is {first}"
            return BeyondLog(
                f"partition {number}: {what}, and "
                + (f"the last id that can be read is {there.last}" if there.count else "nothing is there to read yet"),
                not_done=_NOT_READ,
                next_step=f"ask for ids up to {there.last}, or set {FAIL_ON_DATA_LOSS} to false to read what is there",
                last_id=there.last,
            )
        return None


def selection_of(options: Mapping[str, str], *, is_stream: bool = False) -> Selection:
    """Parse the options about the selection and ignore others; names are in lower case, as Spark passes them."""

    def said(name: str) -> str | None:
        return options.get(name.lower())

    starting = said(STARTING)
    ending = said(ENDING)
    first = Bound(others=EARLIEST) if starting is None else _bound(STARTING, starting, others=EARLIEST)
    if not is_stream and LATEST in (first.others, *first.named.values()):
        raise BadArgument(f"{STARTING}: nothing lies behind the latest id, so there would be nothing to read")
    last = Bound(others=LATEST) if ending is None else _bound(ENDING, ending, others=LATEST)
    if EARLIEST in (last.others, *last.named.values()):
        raise BadArgument(f"{ENDING}: nothing lies before the earliest id, so there would be nothing to read")
    since, until = _time(STARTING_TIME, said(STARTING_TIME), starting), _time(ENDING_TIME, said(ENDING_TIME), ending)
    if since is not None and until is not None and until < since:
        raise BadArgument(f"{ENDING_TIME} lies before {STARTING_TIME}", not_done=_NOT_READ)
    numbers, loss = said(PARTITIONS), said(FAIL_ON_DATA_LOSS)
    return Selection(
        starting=first,
        ending=last,
        starting_time=since,
        ending_time=until,
        partitions=None if numbers is None else partitions_of(numbers),
        fails_on_loss=True if loss is None else truth_of(FAIL_ON_DATA_LOSS, loss),
    )


def _time(name: str, text: str | None, ids: str | None) -> int | None:
    """Parse a time; relative times are not accepted, because Spark evaluates options more than once."""
    if text is None:
        return None
    if ids is not None:
        raise BadArgument(
            f"{name} and an id say the same thing twice", not_done=_NOT_READ, next_step="leave one of them out"
        )
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise BadArgument(
            f"{name} is {text!r}, which is no time", not_done=_NOT_READ,
            next_step="write it as 2026-11-23T14:00, in UTC unless it has a zone",
        ) from error  # fmt: skip
    return ((found if found.tzinfo is not None else found.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND


def partitions_of(text: str) -> tuple[int, ...]:
    """Parse `0-3,7` as (0, 1, 2, 3, 7): each number once, in order."""
    found: set[int] = set()
    for part in text.split(","):
        given = _RANGE.fullmatch(part.strip())
        numbers = range(int(given[1]), int(given[2] or given[1]) + 1) if given is not None else range(0)
        if not numbers or numbers[-1] >= PARTITIONS_MAX:
            raise BadArgument(
                f"{PARTITIONS}: {part.strip()!r} is no partition and no range of partitions", next_step="write it as 0-3,7"
            )
        found.update(numbers)
    return tuple(sorted(found))


def truth_of(name: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise BadArgument(f"{name} is {text!r}; it can be true or false")
    return text.strip().lower() == "true"


def number_of(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or int(text) == 0:
        raise BadArgument(f"{name} is {text!r}; it has to be a whole number above 0")
    return int(text)


def _bound(name: str, text: str, *, others: int) -> Bound:
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return Bound(others=word)
    how = f'{name} is {text!r}; it can be earliest, latest, or JSON that gives an id for each partition, as in {{"0": 100}}'
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _once(name, pairs))
    except (ValueError, RecursionError) as error:
        raise BadArgument(how) from error
    if not isinstance(found, dict):
        raise BadArgument(how)
    return Bound(others=others, named={_partition(name, key): _id(name, key, value) for key, value in found.items()})


def _once(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadArgument(f"{name} names a partition twice")
    return found


def _partition(name: str, key: str) -> int:
    if not _NUMBER.fullmatch(key) or int(key) >= PARTITIONS_MAX:
        raise BadArgument(f"{name}: {key!r} is not the number of a partition")
    return int(key)


def _id(name: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not EARLIEST <= value <= ID_MAX:
        raise BadArgument(
            f"{name}: {json.dumps(value)[:40]} for partition {key} is no transaction id, nor -1 (latest) or -2 (earliest)"
        )
    return value


def _listed(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return ", ".join(map(str, found[:10])) + (f" and {len(found) - 10} more" if len(found) > 10 else "")
