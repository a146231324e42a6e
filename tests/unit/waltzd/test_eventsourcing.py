"""The persistence module for `eventsourcing`, by the suites of the installed package, unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import TestCase, mock

import pytest
from eventsourcing.application import Application
from eventsourcing.dcb.tests import DCBRecorderTestCase
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import (
    InfrastructureFactoryError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    StoredEvent,
    Tracking,
    TrackingRecorder,
)
from eventsourcing.tests.application import ApplicationTestCase, ExampleApplicationTestCase
from eventsourcing.tests.persistence import (
    AggregateRecorderTestCase,
    ApplicationRecorderTestCase,
    InfrastructureFactoryTestCase,
    NonInterleavingNotificationIDsBaseCase,
    ProcessRecorderTestCase,
    TrackingRecorderTestCase,
)
from eventsourcing.utils import Environment

import waltzd.eventsourcing as adapter
from waltzd.client.blocking import BlockingClient
from waltzd.testing import BlockingCluster

MODULE = "waltzd.eventsourcing"
pytestmark = pytest.mark.filterwarnings("default:'log' is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingCluster]:
    """A cluster of one partition of its own for each test, as the environment of an application names it."""
    with BlockingCluster() as cluster:
        monkeypatch.setattr(adapter, "BlockingClient", partial(BlockingClient, connect=cluster.connect))
        monkeypatch.setenv("PERSISTENCE_MODULE", MODULE)
        monkeypatch.setenv("WALTZ_SERVERS", ",".join(cluster.servers))
        clients: list[BlockingClient] = []
        opened = BlockingClient.open

        def open_and_keep(client: BlockingClient, **options: Any) -> None:
            clients.append(client)
            opened(client, **options)

        with mock.patch.object(BlockingClient, "open", open_and_keep):
            yield cluster
        for client in clients:
            client.close()


def factory(name: str = "") -> Any:
    found = adapter.WaltzFactory.construct(Environment(name, dict(os.environ)))
    assert isinstance(found, adapter.WaltzFactory)
    return found


class TestAggregateRecorder(AggregateRecorderTestCase):
    def create_recorder(self) -> Any:
        return factory().aggregate_recorder()


class TestSnapshotRecorder(AggregateRecorderTestCase):
    def create_recorder(self) -> Any:
        return factory().aggregate_recorder("snapshots")


class TestAggregateRecorderWithTexts(AggregateRecorderTestCase):
    def new_originator_id(self) -> Any:
        return f"account:{super().new_originator_id()}"

    def create_recorder(self) -> Any:
        return factory().aggregate_recorder()


class TestApplicationRecorder(ApplicationRecorderTestCase[Any]):
    def create_recorder(self) -> Any:
        return factory().application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestNonInterleaving(NonInterleavingNotificationIDsBaseCase):
    insert_num = 200

    def create_recorder(self) -> Any:
        return factory().application_recorder()


class TestTrackingRecorder(TrackingRecorderTestCase):
    def create_recorder(self) -> Any:
        return factory().tracking_recorder()


class TestProcessRecorder(ProcessRecorderTestCase):
    def create_recorder(self) -> Any:
        return factory().process_recorder()


class TestDcbRecorder(DCBRecorderTestCase):
    def test_append_read(self) -> None:
        self._test_append_read(factory().dcb_recorder())

    def test_append_subscribe(self) -> None:
        self._test_append_subscribe(factory().dcb_recorder())


class OwnTrackingRecorder(adapter.WaltzTrackingRecorder):
    pass


class TestFactory(InfrastructureFactoryTestCase[adapter.WaltzFactory]):
    def setUp(self) -> None:
        self.env = Environment("TestCase", dict(os.environ))
        super().setUp()

    def expected_factory_class(self) -> type[adapter.WaltzFactory]:
        return adapter.WaltzFactory

    def expected_aggregate_recorder_class(self) -> Any:
        return adapter.WaltzAggregateRecorder

    def expected_application_recorder_class(self) -> Any:
        return adapter.WaltzApplicationRecorder

    def expected_tracking_recorder_class(self) -> Any:
        return adapter.WaltzTrackingRecorder

    def tracking_recorder_subclass(self) -> type[TrackingRecorder]:
        return OwnTrackingRecorder

    def expected_process_recorder_class(self) -> Any:
        return adapter.WaltzProcessRecorder


class TestExampleApplication(ExampleApplicationTestCase):
    expected_factory_topic = "waltzd.eventsourcing:WaltzFactory"


class TestApplications(ApplicationTestCase):
    pass


del (  # they are run by the classes above, and pytest would collect them here
    AggregateRecorderTestCase,
    ApplicationRecorderTestCase,
    ApplicationTestCase,
    DCBRecorderTestCase,
    ExampleApplicationTestCase,
    InfrastructureFactoryTestCase,
    NonInterleavingNotificationIDsBaseCase,
    ProcessRecorderTestCase,
    TestCase,
    TrackingRecorderTestCase,
)


# -- what the suites do not ask --------------------------------------------------------------------------------------------


class Account(Aggregate):
    def __init__(self) -> None:
        self.balance = 0

    @event("Deposited")
    def deposit(self, amount: int) -> None:
        self.balance += amount


def test_an_application_goes_on_where_another_process_stopped() -> None:
    first, second = Application[Any](), Application[Any]()
    account = Account()
    account.deposit(5)
    first.save(account)
    one: Account = first.repository.get(account.id)
    other: Account = second.repository.get(account.id)
    assert (one.balance, other.balance) == (5, 5)
    one.deposit(1)
    other.deposit(2)
    first.save(one)
    with pytest.raises(IntegrityError):
        second.save(other)
    assert second.repository.get(account.id).balance == 6


def test_applications_and_purposes_do_not_see_each_other() -> None:
    recorders = [
        factory("one").application_recorder(), factory("other").application_recorder(),
        factory("one").aggregate_recorder("snapshots"),
    ]  # fmt: skip
    for recorder in recorders:
        recorder.insert_events([StoredEvent("account", 1, "opened", b"")])
    assert [len(recorder.select_events("account")) for recorder in recorders] == [1, 1, 1]
    assert [len(recorder.select_notifications(None, 9)) for recorder in recorders[:2]] == [1, 1]


def test_behind_a_snapshot_only_what_follows_it_is_read() -> None:
    recorder, rows = factory().application_recorder(), 0
    for number in range(1, 11):
        recorder.insert_events([StoredEvent("account", number, "opened", b"")])
    read = recorder._store._read

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal rows
        found = read(*arguments, **options)
        rows += len(found.events)
        return found

    with mock.patch.object(recorder._store, "_read", counted):
        assert [one.originator_version for one in recorder.select_events("account", gt=8)] == [9, 10]
        assert rows == 3, "the event of the snapshot, and those behind it"
        for gt, limit, wanted in ((10, None, []), (11, None, range(0)), (8, 1, [9]), (0, 2, [1, 2]), (-1, 1, [1])):
            found = recorder.select_events("account", gt=gt, limit=limit)
            assert [one.originator_version for one in found] == list(wanted)
        assert [one.originator_version for one in recorder.select_events("account", gt=8, desc=True)] == [10, 9]
        assert [one.originator_version for one in recorder.select_events("account", gt=7, lte=9, limit=1)] == [8]


def test_a_tracking_id_alone_is_no_notification() -> None:
    recorder = factory().process_recorder()
    for number in (1, 2, 3):
        recorder.insert_events([], tracking=Tracking("other", number))
        recorder.insert_events([StoredEvent("account", number, "opened", b"")])
    found = recorder.select_notifications(None, 2)
    assert [(one.originator_version, one.id) for one in found] == [(1, 2), (2, 4)]
    assert [one.id for one in recorder.select_notifications(4, 9, inclusive_of_start=False)] == [6]


def test_a_subscription_leaves_nothing_out_behind_a_fork(environment: BlockingCluster) -> None:
    """A notification id has its timeline, also on the way into the recorder: behind a fork it is refused there, before
    what others recorded meanwhile is taken for what follows it."""
    recorder = factory().application_recorder()
    for number in (1, 2, 3):
        recorder.insert_events([StoredEvent("account", number, "opened", b"")])
    last = recorder.select_notifications(None, 9)[-1].id
    environment.rescue(recorder._store.partition, 0)
    other = factory().application_recorder()
    for number in (2, 3, 4, 5):
        other.insert_events([StoredEvent("account", number, "opened anew", b"")])
    for inclusive in (True, False):
        with pytest.raises(OperationalError):
            recorder.select_notifications(last, 9, inclusive_of_start=inclusive)
    assert [one.id for one in recorder.select_notifications(3, 9)] == [3, 4, 5], "a bare id is one of the current log"


def test_two_processes_record_an_event_of_another_application_once() -> None:
    one: Any = factory().process_recorder()
    other: Any = factory().process_recorder()
    read = one._newest

    def newest(name: str) -> Any:
        found = read(name)
        other.insert_events([StoredEvent("account", 1, "paid", b"")], tracking=Tracking("shop", 7))
        one._newest = read
        return found

    one._newest = newest
    with pytest.raises(IntegrityError, match="tracking id 7 of shop is not above 7"):
        one.insert_events([StoredEvent("account", 2, "paid", b"")], tracking=Tracking("shop", 7))
    assert len(one.select_events("account")) == 1


def test_errors_have_the_names_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = factory().dcb_recorder()
    with pytest.raises(ProgrammingError, match="at least one event"):
        recorder.append([])
    with pytest.raises(ProgrammingError, match="a position of an event store"):
        recorder.read(after=-1)
    one = factory()
    one.close()
    with pytest.raises(OperationalError, match="W2063"):
        one.dcb_recorder().read()
    for name, value, message in (
        ("WALTZ_SERVERS", "", "WALTZ_SERVERS is not set"),
        ("WALTZ_PARTITION", "first", "must be a number"),
        ("WALTZ_TLS_KEY", "key.pem", "give all of WALTZ_TLS_CERTIFICATE"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with pytest.raises(InfrastructureFactoryError, match=message):
                factory()
