"""What a client says of itself: a view that stands still is seen, and says why and since when."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.told import told
from tests.unit.waltzd.client.test_client import View, until, with_client
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Decision, Transaction
from waltzd.errors import ClientClosed, NotApplied, ViewStopped


class ViewFailure(View):
    """A view whose database is away for a while."""

    is_mended = False
    tries = 0

    async def apply(self, transaction: Transaction) -> None:
        if transaction.payload == b"poison" and not self.is_mended:
            self.tries += 1
            raise OSError("the database is away")
        await super().apply(transaction)


class Poisoned(ViewFailure):
    def failed(self, transaction: Transaction, error: Exception) -> Decision:
        return Decision.STOP


def test_a_view_that_stands_still_is_not_ready_and_says_why_since_when_and_how_far_it_is_behind() -> None:
    view, before = ViewFailure(), datetime.now(UTC)

    async def test(client: Client, fake: FakeCluster) -> None:
        await until(lambda: client.status().ready)
        fake.partitions[0].write(b"a", b"poison", b"b", b"c")
        await until(lambda: view.tries > 3)
        status = client.status()
        (state,) = status
        assert not status.ready
        assert (state.applied, state.lag, state.is_ready) == (0, 3, False)
        assert state.failing == "transaction 1: OSError('the database is away')"
        assert state.since is not None
        assert before <= state.since <= datetime.now(UTC)
        assert "failed" in state.sentence
        with pytest.raises(NotApplied, match="the view fails: OSError"):
            await client.wait_caught_up(timeout=1)
        view.is_mended = True
        await client.wait_caught_up()
        (state,) = client.status()
        assert (state.applied, state.lag, state.failing, state.since) == (3, 0, None, None)
        assert client.status().ready

    with_client(test, view=view)


def test_a_lag_grows_although_the_feed_stands_still() -> None:
    """What was fed and not applied is bounded; what was committed is not."""
    view = ViewFailure()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"poison")
        await until(lambda: view.tries)
        fake.partitions[0].write(*[b"x" * 1000] * 2000)
        await until(lambda: client.status().lag == 2001)
        assert client.status()[0].received < 2000
        view.is_mended = True
        await client.wait_caught_up()

    with_client(test, view=view, settings=ClientSettings(feed_bytes_max=100_000))


@pytest.mark.slow
def test_a_failure_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    view = ViewFailure()

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"poison")
        await until(lambda: view.tries == 100)
        view.is_mended = True
        await until(lambda: view.payloads())

    with caplog.at_level(logging.WARNING, "waltz.client"):
        with_client(test, view=view)
    said = [record for record in caplog.records if record.name == "waltz.client"]
    assert [record.exc_info is not None for record in said] == [True] + [False] * 7
    counts = [record.args[1] for record in said[1:-1] if isinstance(record.args, tuple)]
    assert counts == [2, 4, 8, 16, 32, 64]
    assert "has taken transaction 0 of partition 0 after 100 failures" in said[-1].getMessage()


def test_who_waits_is_told_why_a_partition_was_stopped() -> None:
    view = Poisoned()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.wait_stopped(timeout=1)
        waiting = asyncio.create_task(client.wait_stopped())
        fake.partitions[1].write(b"poison")
        with pytest.raises(ViewStopped, match="transaction 0 of partition 1"):
            await waiting
        with pytest.raises(ViewStopped):
            await client.wait_stopped()
        assert not client.status().ready
        view.is_mended = True
        await client.set_partitions([0])
        await client.set_partitions("all")
        await client.wait_caught_up()
        await until(lambda: client.status().ready)
        waiting = asyncio.create_task(client.wait_stopped())
        await asyncio.sleep(0)
        await client.close()
        await waiting
        assert not client.status().ready, "a client that is closed is not"
        assert client._stops == {}
        with pytest.raises(ClientClosed):
            await client.wait_stopped()

    with_client(test, view=view, cluster=FakeCluster(partitions=2))


def test_a_decision_that_was_forgotten_parks(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(ViewFailure):
        def failed(self, transaction: Transaction, error: Exception) -> Decision:
            return None  # type: ignore[return-value]

    async def test(client: Client, fake: FakeCluster) -> None:
        fake.partitions[0].write(b"poison")
        with pytest.raises(ViewStopped, match="the database is away"):
            await client.wait_stopped()

    with_client(test, view=Forgets())
    assert "`failed` of the view returned None for transaction 0 of partition 0" in caplog.text


@told(with_client, given=2)
async def test_without_a_view_nothing_lags(client: Client, fake: FakeCluster) -> None:
    await client.append(b"x", partition=0)
    fake.partitions[0].write(b"y")
    state: Any = client.status()[0]
    assert (state.lag, state.failing, state.since) == (0, None, None)
    assert client.status().ready
