"""Times as people type them, and as they are shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.shell.moment import FORMS, iso, microseconds, shown
from waltzd.errors import BadArgument

NOW = datetime(2026, 11, 23, 14, 30, 5, 250_000, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2026-11-23T14:00", "2026-11-23T14:00:00.000000Z"),
        ("2026-11-23 14:00:05", "2026-11-23T14:00:05.000000Z"),
        ("2026-11-23T14:00:05.123456Z", "2026-11-23T14:00:05.123456Z"),
        ("2026-11-23T14:00:05.25+01:00", "2026-11-23T13:00:05.250000Z"),
        ("2026-11-23", "2026-11-23T00:00:00.000000Z"),
        ("-2h", "2026-11-23T12:30:05.250000Z"),
        ("15m", "2026-11-23T14:15:05.250000Z"),
        ("90s", "2026-11-23T14:28:35.250000Z"),
        ("-1d", "2026-11-22T14:30:05.250000Z"),
        ("1970-01-01T01:00+01:00", "1970-01-01T00:00:00.000000Z"),
    ],
)
def test_what_is_understood(text: str, meant: str) -> None:
    assert iso(microseconds(text, NOW, "--since")) == meant


@pytest.mark.parametrize(
    "text", ["yesterday", "", "2h30m", "--2h", "14:00", "-2w", "2026-13-01", "2026-11-23T25:00", "1e3", "15"]
)
def test_what_is_no_time_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(BadArgument, match=r"--since .*: this is not a time") as refused:
        microseconds(text, NOW, "--since")
    assert (refused.value.exit_code, refused.value.detail_next_step) == (2, f"write it as {FORMS}")


def test_what_is_older_than_the_epoch_is_refused() -> None:
    for text in ("1969-12-31T23:59:59.999999", "0001-01-01T00:00+23:59", "-999999d"):
        with pytest.raises(BadArgument, match="this is before 1970"):
            microseconds(text, NOW, "--before")


@given(st.integers(0, 253_402_300_799_999_999))
def test_what_is_shown_is_understood_again(time: int) -> None:
    assert microseconds(iso(time), NOW, "--since") == time
    assert microseconds(shown(time), NOW, "--since") == time // 1000 * 1000
    assert microseconds(shown(time, is_narrow=True), NOW, "--since") == time // 1_000_000 * 1_000_000
    assert datetime.fromisoformat(iso(time)) == EPOCH + timedelta(microseconds=time)


def test_a_clock_that_shows_no_time_is_shown_as_a_number() -> None:
    assert shown(1 << 62) == str(1 << 62)
