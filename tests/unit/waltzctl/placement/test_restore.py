"""The documents of a restored cluster: above everything that is known of the old one, and such that its first owner, by its
own code, has nothing to decide."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.archives import ARCHIVE, Uploads
from tests.batches import batches_of
from tests.simulation.faulty_store import FaultyStore
from waltzctl.placement.backup import Source
from waltzctl.placement.metadata import Target
from waltzctl.placement.proof import Proven
from waltzctl.placement.replica_assignment import assign_replicas
from waltzctl.placement.restore import SESSIONS_AHEAD, RestoreSpec, of_size, partition_meta, restoration
from waltzd.archive.cut_point import CutPoint, cut_latest
from waltzd.archive.manifest import Label
from waltzd.cluster.cluster import ARCHIVES, ASSIGNMENT, CLIENT_IDS, EXPECTED, PARTITIONS, POLICY, ROOT, STORAGES
from waltzd.cluster.documents import (
    NO_SECRET,
    Assignment,
    ClusterMeta,
    Counter,
    Membership,
    Ownership,
    PartitionMeta,
    PolicyDocument,
    ServerMeta,
    StorageMeta,
)
from waltzd.cluster.metadata import SavedDocuments, without_secret
from waltzd.errors import BadArgument
from waltzd.errors.operations import Unsafe
from waltzd.protocol.channels import Parts
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.document import Document
from waltzd.protocol.policy import Grant, Pattern, Verb
from waltzd.protocol.timelines import NEVER_FORKED, TIMELINES_MAX
from waltzd.server.core.recovery import Recovery, Step

OLD, NEW = UUID(int=1), UUID(int=2)
STORAGES_OF_IT = {name: StorageMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", group=name) for name in "abc"}


def source(*, session: int = 40) -> Source:
    """Two partitions; batches are of session 4, and the documents know of a later one."""
    store = FaultyStore()
    logs = {}
    for number in range(2):
        uploads = Uploads(store, cluster=OLD, partition=number)
        uploads.batches(batches_of([[b"a", b"b"], [b"c"]], cuts=[1], partition=number))
        logs[number] = uploads.log()
    documents: dict[str, Document] = {
        ROOT: ClusterMeta(name="orders", key=OLD, partitions=2, created="2026", format=1),
        ASSIGNMENT: Assignment(owners=(Ownership("x", 70), Ownership(None, 3))),
        CLIENT_IDS: Counter(5_000, UUID(int=77)),
        POLICY: PolicyDocument(grants=(Grant(names=(Pattern("x"),), may=(Verb.READ,), partitions=Parts("0")),)),
        f"{PARTITIONS}/0": PartitionMeta(generation=7, session=session),
        f"{STORAGES}/old": StorageMeta(name="old", listen="o:1", admin_listen="o:2", group="old"),
        f"{EXPECTED}/x": ServerMeta(name="x", listen="x:1", admin_listen="x:2", instance=UUID(int=5), version="1"),
    }
    saved = SavedDocuments(moment="2026-11-24T10:00:00+00:00", documents=documents)
    return Source(place="there", label=Label(archive=ARCHIVE, cluster=OLD), logs=logs, newest=saved, store=store)


def spec(*, key: UUID = NEW, session: int = 40) -> RestoreSpec:
    found = source(session=session)
    assert found.newest is not None
    return RestoreSpec(
        source=found,
        cut=cut_latest(found.logs, is_each=True),
        saved=found.newest,
        meta=replace(found.newest.meta, key=key),
        storages=STORAGES_OF_IT,
        planned=assign_replicas(2, dict.fromkeys("abc", "g"), 3),
    )


def statuses(wanted: RestoreSpec, partition: int) -> dict[str, ReplicaStatus]:
    """As storages answer that have carried out the order."""
    order = wanted.order(partition)
    return {
        name: ReplicaStatus(
            partition=partition, session=order.session, promised_session=order.session, low_mark=order.mark,
            local_low_mark=order.mark, committed=order.mark, last_id=order.mark, incarnation=UUID(int=9 + at),
            is_available=True, is_full=False, segments=1, findings=(),
        )
        for at, name in enumerate(wanted.planned[partition])
    }  # fmt: skip


def test_sessions_are_above_every_one_that_is_known_of() -> None:
    assert [spec().session(number) for number in (0, 1)] == [40 + SESSIONS_AHEAD, 4 + SESSIONS_AHEAD]
    assert spec(session=2).session(0) == 4 + SESSIONS_AHEAD


def test_a_run_that_resumes_keeps_the_sessions_of_the_replicas_that_are_made() -> None:
    """The cluster in the store may go on meanwhile, and its archive tell of a later session."""
    first = spec(session=40)
    later = replace(spec(session=43), sessions={0: first.session(0), 1: first.session(1)}, began=first.began)
    assert [later.order(number) for number in (0, 1)] == [first.order(number) for number in (0, 1)]
    ahead = replace(spec(session=2000), sessions={0: first.session(0)})
    assert ahead.session(0) == 2000 + SESSIONS_AHEAD, "no owner of the old cluster may be above the new one"


def test_what_says_where_things_were_is_left_out_and_the_rest_goes_on() -> None:
    wanted = spec()
    found = restoration(wanted, {number: statuses(wanted, number) for number in (0, 1)})
    assert found.meta == ClusterMeta(name="orders", key=NEW, partitions=2, created="2026", format=1)
    assert set(found.documents) == {POLICY, CLIENT_IDS, *(f"{STORAGES}/{name}" for name in "abc")}
    counter = found.documents[CLIENT_IDS]
    assert isinstance(counter, Counter)
    assert counter.next > 5_000
    assert counter.secret != UUID(int=77)
    owners = found.assignment(Target()).owners
    assert [owner.server for owner in owners] == [None, None]
    assert owners[0].generation > 70
    roles = [one.roles for one in found.verdicts if isinstance(one, Proven)]
    assert roles == [dict.fromkeys("abc", Membership.MEMBER)] * 2


def test_an_archive_is_gone_on_with_only_under_its_own_key() -> None:
    same = spec(key=OLD)
    found = restoration(same, {number: statuses(same, number) for number in (0, 1)})
    assert {f"{ARCHIVES}/0", f"{ARCHIVES}/1"} <= set(found.documents)
    counter = found.documents[CLIENT_IDS]
    assert isinstance(counter, Counter)
    assert counter.secret == UUID(int=77)
    assert same.source.newest is not None
    saved = without_secret(same.source.newest)
    told = {number: statuses(same, number) for number in (0, 1)}
    other = restoration(replace(same, source=replace(same.source, newest=saved)), told)
    made = other.documents[CLIENT_IDS]
    assert isinstance(made, Counter)
    assert made.secret not in (UUID(int=77), NO_SECRET), "an archive has none, so another one is made"
    shorter = replace(same, cut=replace(same.cut, points={**same.cut.points, 1: CutPoint(mark=1)}))
    assert shorter.is_same_key, "the new timeline takes over what is whole in front of the cut"
    assert [one.fork for one in shorter.lineage(1).later] == [1]
    assert shorter.order(1).timelines == tuple(
        one.bare for one in partition_meta(shorter, 1, statuses(shorter, 1)).timelines
    )
    assert not spec().is_same_key


def test_the_first_owner_has_nothing_to_decide() -> None:
    """A majority of the storages is enough, as after an orderly end."""
    wanted = spec()
    for number in (0, 1):
        reported = statuses(wanted, number)
        saved = partition_meta(wanted, number, reported)
        meta = replace(saved, session=saved.session + 1)
        roles = dict.fromkeys(sorted(reported), Membership.MEMBER)
        asking = Recovery(meta, roles, is_taken=False)
        for name in ("a", "b"):
            asking.asked(name, reported[name])
        assert asking.refusal is None
        assert asking.has_asked_enough
        recovery = Recovery(meta, roles)
        for name in ("a", "b"):
            recovery.asked(name, reported[name])
            recovery.opened(name, replace(reported[name], promised_session=meta.session))
        assert recovery.refusal is None
        assert (recovery.decide(), recovery.step) == (2, Step.SETTLING)


def with_group_log(*, is_saved: bool = True) -> Source:
    """The same cluster, which also has a group log."""
    found = source()
    uploads = Uploads(found.store, cluster=OLD, partition=2)
    uploads.batches(batches_of([[b"made", b"stands"]], cuts=[1], partition=2))
    assert found.newest is not None
    owners = (Ownership("x", 70), Ownership(None, 3), *((Ownership("y", 90),) if is_saved else ()))
    documents = {**found.newest.documents, ASSIGNMENT: Assignment(owners=owners)}
    return replace(found, logs={**found.logs, 2: uploads.log()}, newest=replace(found.newest, documents=documents))


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_cluster_gets_its_groups_back(is_saved: bool) -> None:
    """Also where the log was archived before its documents were saved."""
    found = of_size(with_group_log(is_saved=is_saved), 2)
    assert sorted(found.logs) == [0, 1, 2]
    assert found.newest is not None
    wanted = replace(
        spec(),
        source=found,
        cut=cut_latest(found.logs, is_each=True),
        saved=found.newest,
        planned=assign_replicas(len(found.logs), dict.fromkeys("abc", "g"), 3),
    )
    made = restoration(wanted, {number: statuses(wanted, number) for number in range(3)})
    assert made.meta.partitions == 2
    owners = made.assignment(Target()).owners
    assert len(owners) == 3
    assert owners[2].generation > (90 if is_saved else 0)
    assert [one.partition for one in made.proven] == [0, 1, 2]


def test_storages_of_another_size_are_refused_and_no_partition_is_taken_for_the_group_log() -> None:
    with pytest.raises(BadArgument, match="set up for 3 partitions"):
        of_size(with_group_log(), 3)
    with pytest.raises(BadArgument, match="set up for 2 partitions"):
        of_size(replace(with_group_log(), newest=None), 2)
    assert sorted(of_size(source(), 2).logs) == [0, 1]


def test_a_log_that_forked_as_often_as_it_can_is_refused_by_name() -> None:
    tree = NEVER_FORKED
    for number in range(TIMELINES_MAX):
        tree = tree.forked(identity=UUID(int=number + 2), fork=1, session=9, cause="rescue", began="now", who=None)
    found = spec()
    found.source.logs[1].tree = tree
    assert found.lineage(0).number == 2
    with pytest.raises(Unsafe, match="partition 1 has forked 64 times, as often as it can"):
        found.lineage(1)
