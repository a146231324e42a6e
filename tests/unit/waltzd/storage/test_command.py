"""The storage process: what does not end it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from waltzd.errors.operations import NoPermission
from waltzd.storage import command


def test_a_reserve_that_cannot_be_kept_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    class StorageCalls:
        async def keep_reserve(self) -> None:
            raise NoPermission("creating the reserve: Read-only file system (EROFS)")

    calls: Any = StorageCalls()
    with caplog.at_level(logging.WARNING):
        asyncio.run(command._keep_reserve(calls))
    assert "W1005" in caplog.text
    assert "Read-only file system" in caplog.text
