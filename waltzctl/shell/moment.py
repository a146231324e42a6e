"""A moment as people type it, and as they read it: microseconds since 1970 in between.

A time without a zone is UTC, as everything that is shown. Transactions carry the clock of the server that took them, so
what is relative is relative to the clock of this machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from waltzd.errors import BadArgument

FORMS = "2026-11-23T14:00, 2026-11-23T14:00:05.25+01:00, 2026-11-23, or how long ago: 90s, 15m, 2h, 1d"
HELP = "As 2026-11-23T14:00, in UTC unless it has a zone, or how long ago: 15m, -2h."
_LENGTH = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class Within:
    """From one moment to another, without that one; None where there is no bound."""

    since: int | None
    until: int | None

    @property
    def is_bounded(self) -> bool:
        return self.since is not None or self.until is not None


def seconds(text: str) -> int | None:
    """`90s`, `10m`, `2h`, `1d`; None for anything else."""
    found = _LENGTH.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


def microseconds(text: str, now: datetime, option: str) -> int:
    """`now`: what relative times are relative to. `option`: who gave the text."""
    ago = seconds(text.removeprefix("-"))
    found = now if ago is not None else _parsed(text, option)
    time = (found - _EPOCH) // _MICROSECOND - 1_000_000 * (ago or 0)
    if time < 0:
        raise BadArgument(f"{option} {text}: no transaction is older than 1970", not_done="nothing was read")
    return time


def _parsed(text: str, option: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadArgument(
            f"{option} {text}: this is no time", not_done="nothing was read", next_step=f"write it as {FORMS}"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def iso(time: int) -> str:
    """With all its digits, for programs."""
    return _spelled(time, 6)


def shown(time: int, *, is_narrow: bool = False) -> str:
    """To the millisecond, as lines of logs, or only to the second."""
    return _spelled(time, 0 if is_narrow else 3)


def _spelled(time: int, digits: int) -> str:
    try:
        whole = _EPOCH + timedelta(microseconds=time)
    except OverflowError:  # of a clock that shows no time
        return str(time)
    fraction = f".{whole.microsecond // 10 ** (6 - digits):0{digits}d}" if digits else ""
    return f"{whole:%Y-%m-%dT%H:%M:%S}{fraction}Z"
