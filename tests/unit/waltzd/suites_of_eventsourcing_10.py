"""The persistence module by the suites of `eventsourcing` 10, unchanged. `test_eventsourcing_10.py` runs this file, with
that version in front of the installed one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import pytest
from eventsourcing.utils import Environment

import waltzd.eventsourcing as adapter
from waltzd.client.blocking import BlockingClient
from waltzd.dcb import BlockingEventStore, Event
from waltzd.testing import BlockingCluster

assert adapter.IS_10
api: Any = import_module("eventsourcing.dcb.api")
persistence: Any = import_module("eventsourcing.persistence")
dcb_suites: Any = import_module("eventsourcing.dcb.tests")
suites: Any = import_module("eventsourcing.tests.persistence")
application_suites: Any = import_module("eventsourcing.tests.application")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingCluster]:
    """A cluster of one partition of its own for each test, as the environment of an application names it."""
    with BlockingCluster() as cluster:
        monkeypatch.setattr(adapter, "BlockingClient", partial(BlockingClient, connect=cluster.connect))
        monkeypatch.setenv("PERSISTENCE_MODULE", "waltzd.eventsourcing")
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
    return adapter.WaltzFactory.construct(Environment(name, dict(os.environ)))


class TestAggregateRecorder(suites.AggregateRecorderTestCase):  # type: ignore[misc]
    def create_recorder(self) -> Any:
        return factory().aggregate_recorder()


class TestSnapshotRecorder(suites.AggregateRecorderTestCase):  # type: ignore[misc]
    def create_recorder(self) -> Any:
        return factory().aggregate_recorder("snapshots")


class TestApplicationRecorder(suites.ApplicationRecorderTestCase):  # type: ignore[misc]
    def create_recorder(self) -> Any:
        return factory().application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestNonInterleaving(suites.NonInterleavingNotificationIDsBaseCase):  # type: ignore[misc]
    insert_num = 200

    def create_recorder(self) -> Any:
        return factory().application_recorder()


class TestTrackingRecorder(suites.TrackingRecorderTestCase):  # type: ignore[misc]
    def create_recorder(self) -> Any:
        return factory().tracking_recorder()


class TestProcessRecorder(suites.ProcessRecorderTestCase):  # type: ignore[misc]
    def create_recorder(self) -> Any:
        return factory().process_recorder()


class TestDcbRecorder(dcb_suites.DcbRecorderTestCase):  # type: ignore[misc]
    def test_append_read(self) -> None:
        self._test_append_read(factory().dcb_recorder())

    def test_append_subscribe(self) -> None:
        self._test_append_subscribe(factory().dcb_recorder())


class OwnTrackingRecorder(adapter.WaltzTrackingRecorder):
    pass


class TestFactory(suites.InfrastructureFactoryTestCase):  # type: ignore[misc]
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

    def tracking_recorder_subclass(self) -> Any:
        return OwnTrackingRecorder

    def expected_process_recorder_class(self) -> Any:
        return adapter.WaltzProcessRecorder


class TestExampleApplication(application_suites.ExampleApplicationTestCase):  # type: ignore[misc]
    expected_factory_topic = "waltzd.eventsourcing:WaltzFactory"


class TestApplications(application_suites.ApplicationTestCase):  # type: ignore[misc]
    pass


# -- what the suites do not ask --------------------------------------------------------------------------------------------


def test_the_uuid_and_the_metadata_of_an_event_come_back() -> None:
    recorder = factory().application_recorder()
    given = [
        persistence.StoredEvent(
            originator_id="account", originator_version=number, topic="opened", state=state, uuid=uuid, metadata=metadata
        )
        for number, (state, uuid, metadata) in enumerate(
            [
                (b"state", uuid4(), {"user": "ann", "trace": "ü"}),
                (b"state", UUID(int=0), {}),
                (adapter._MARK + b"state", UUID(int=0), {}),
            ]
        )
    ]
    recorder.insert_events(given)
    assert list(recorder.select_events("account")) == given
    found = recorder.select_notifications(None, 9)
    assert [(one.state, one.uuid, one.metadata) for one in found] == [(one.state, one.uuid, one.metadata) for one in given]
    dcb = factory().dcb_recorder()
    assert dcb.head() is None
    event = api.DcbEvent(type="opened", data=b"data", tags=["account"], uuid=uuid4(), metadata={"user": "ann"})
    assert dcb.append([event]) == dcb.head()
    assert [one.event for one in dcb.read()] == [event]


def test_what_version_9_wrote_is_read_and_its_versions_stay_taken(environment: BlockingCluster) -> None:
    """Events as 9.5 stores them: no UUID and no metadata, and an aggregate with a UUID."""
    account = uuid4()
    recorder = factory().application_recorder()
    store: BlockingEventStore = recorder._store
    store.append([Event("opened", b"state", [f"uuid:{account}", f"version:1:uuid:{account}"])])
    (found,) = recorder.select_events(str(account))
    assert (found.originator_id, found.state, found.uuid, found.metadata) == (str(account), b"state", UUID(int=0), {})
    again = persistence.StoredEvent(originator_id=str(account), originator_version=1, topic="opened", state=b"")
    with pytest.raises(persistence.IntegrityError):
        recorder.insert_events([again])
