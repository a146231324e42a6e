"""A daemon tells when its certificate ends."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import UUID

import pytest

from tests.process.certificates import Authority
from tests.unit.waltzd.wire.test_tls import swap
from waltzd.daemon.expiry import DAY_SECONDS, Expiry
from waltzd.protocol.role import Role

KEY = UUID(int=7)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


class Told:
    """A daemon with a certificate, on a clock that shows how many days are left of it."""

    def __init__(self, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
        self.files = authority.issue(KEY, Role.STORAGE, "s1")
        tls = self.files.tls(Role.STORAGE)
        self._ends = tls.current().ends
        self._now = 0.0
        self._caplog = caplog
        self.expiry = Expiry(tls, clock=lambda: self._now)

    def at(self, days: float) -> list[str]:
        """What the log says then, by its level; asked twice, as it is looked at again and again."""
        self._now = self._ends - days * DAY_SECONDS
        self._caplog.clear()
        self.expiry.look()
        self.expiry.look()
        return [record.levelname for record in self._caplog.records]


def test_the_end_is_said_once_a_day_before_and_after_it(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    told = Told(authority, caplog)
    with caplog.at_level(logging.INFO):
        assert told.at(200) == told.at(7) == []
        assert told.at(6.9) == ["WARNING"]
        assert "ends at" in caplog.text
        assert told.at(6.1) == []
        assert told.at(5.9) == ["WARNING"]
        assert told.at(0.9) == ["WARNING"]
        assert told.at(0) == []
        assert told.at(-0.0001) == ["ERROR"]
        assert "new connections fail" in caplog.text
        assert told.at(-0.9) == []
        assert told.at(-1.1) == ["ERROR"]


def test_who_starts_in_the_last_days_says_it_at_once(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    assert Told(authority, caplog).at(2.5) == ["WARNING"]


def test_a_certificate_that_is_over_is_a_reason_until_another_one_is_there(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(authority, caplog)
    told.at(1)
    assert (told.expiry.seconds_left(), told.expiry.reasons()) == (DAY_SECONDS, [])
    told.at(-1)
    assert told.expiry.seconds_left() == -DAY_SECONDS
    assert len(told.expiry.reasons()) == 1
    swap(told.files, authority.issue(KEY, Role.STORAGE, "s1", file="new", days=400))
    assert told.expiry.reasons() == []
    assert told.at(-1) == [], "that was the end of the one before"


def test_without_certificates_nothing_ends(caplog: pytest.LogCaptureFixture) -> None:
    expiry = Expiry(None)
    expiry.look()
    assert (expiry.seconds_left(), expiry.reasons(), caplog.records) == (None, [], [])
