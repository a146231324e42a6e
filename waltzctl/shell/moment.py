"""Parse and format points in time; inside they are microseconds since 1970.

A time without a zone is UTC, and output is in UTC. A relative time such as `15m` counts back from the clock of this
machine, while the time of a transaction is from the clock of the server that committed it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from waltzd.errors import BadArgument

FORMS = "2026-11-23T14:00, 2026-11-23T14:00:05.25+01:00, 2026-11-23, or an age: 90s, 15m, 2h, 1d"
HELP = "As 2026-11-23T14:00 (UTC if it has no zone), or an age such as 15m or 2h."
_LENGTH = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class Within:
    """Range of time."""

    since: int | None
    """First microsecond in the range; None for no lower bound."""
    before: int | None
    """First microsecond behind the range; None for no upper bound."""

    @property
    def is_bounded(self) -> bool:
        return self.since is not None or self.before is not None


def seconds(text: str) -> int | None:
    """Parse a duration like `90s`, `10m`, `2h` or `1d`; return None for any other text."""
    found = _LENGTH.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


def microseconds(text: str, now: datetime, option: str) -> int:
    """Parse a time; an age counts back from `now`. `option` names the source of the text in an error."""
    ago = seconds(text.removeprefix("-"))
    found = now if ago is not None else _parsed(text, option)
    time = (found - _EPOCH) // _MICROSECOND - 1_000_000 * (ago or 0)
    if time < 0:
        raise BadArgument(
            f"{option} {text}: this is before 1970, and no transaction is that old", not_done="nothing was read"
        )
    return time


def _parsed(text: str, option: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadArgument(
            f"{option} {text}: this is not a time", not_done="nothing was read", next_step=f"write it as {FORMS}"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def now() -> str:
    """Return the present time with seconds, for documents and the history."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def iso(time: int) -> str:
    """Format a time with microseconds, for programs."""
    return _format(time, 6)


def shown(time: int, *, is_narrow: bool = False) -> str:
    """Format a time with milliseconds, or, narrow, without a fraction."""
    return _format(time, 0 if is_narrow else 3)


def _format(time: int, digits: int) -> str:
    try:
        whole = _EPOCH + timedelta(microseconds=time)
    except OverflowError:  # behind the year 9999: the clock of the server was wrong
        return str(time)
    fraction = f".{whole.microsecond // 10 ** (6 - digits):0{digits}d}" if digits else ""
    return f"{whole:%Y-%m-%dT%H:%M:%S}{fraction}Z"
