"""A store as the source of a restore: one that lost objects, or holds those of another log, is refused by name."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from tests.archives import Uploads
from tests.batches import batches_of
from tests.simulation.faulty_store import FaultyStore
from waltzctl.placement import backup
from waltzctl.placement.backup import End, source_at
from waltzctl.placement.restore import of_size
from waltzd.archive.cut_point import Cut
from waltzd.archive.listing import branches_in, label_of, save_metadata
from waltzd.archive.manifest import Manifest, begin_name, folder_of, manifest_name
from waltzd.archive.unsealed import unsealed_index_name
from waltzd.archive.upload import PartitionArchive
from waltzd.archive.verification import survey
from waltzd.cluster.cluster import ARCHIVES, PARTITIONS, ROOT
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta, PartitionMeta
from waltzd.cluster.metadata import SavedDocuments, write
from waltzd.errors import BadArgument
from waltzd.errors.operations import ArchiveDamaged
from waltzd.protocol.timelines import NEVER_FORKED, Lineage

KEY, SECOND, OTHER = UUID(int=1), UUID(int=2), UUID(int=3)
LATEST = End(latest=True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The log of one partition in two segments, ids 0 to 1 and 2 to 3."""
    found = FaultyStore()
    monkeypatch.setattr(backup, "open_archive", lambda place: found)
    uploaded(found)
    return found


def uploaded(store: FaultyStore, partition: int = 0) -> Manifest:
    uploads = Uploads(store, cluster=KEY, partition=partition)
    uploads.batches(batches_of([[b"a"], [b"b"], [b"c"], [b"d"]], cuts=[1, 3], partition=partition))
    return uploads.manifest


def forked(identity: UUID, fork: int, before: Lineage = NEVER_FORKED) -> Lineage:
    return before.forked(identity=identity, fork=fork, session=7, cause="partition rescue", began="then", who=None)


def begun(store: FaultyStore, lineage: Lineage) -> Manifest:
    """A timeline that takes over the first segment."""
    label = label_of(store, not_done="")
    older = branches_in(store, label, [0])[:1]
    return PartitionArchive(store, label, 0, lineage.current).begin_timeline(lineage, older)


def saved(store: FaultyStore, newest: Manifest, lineage: Lineage | None = None) -> None:
    known = newest.lineage if lineage is None else lineage
    documents = {
        ROOT: ClusterMeta(name="orders", key=KEY, partitions=1, created="2026", format=1),
        f"{PARTITIONS}/0": PartitionMeta(generation=7, session=9, timelines=known.later),
        f"{ARCHIVES}/0": ArchiveMeta(
            archive=newest.archive, number=newest.number, sha256=newest.sha256, last=newest.last, timeline=newest.timeline
        ),
    }
    save_metadata(store, write(SavedDocuments(moment="2026-11-24T10:00:00+00:00", documents=documents)))


def cut(end: End = LATEST) -> Cut:
    return source_at("there", end.chosen).cut_at(end, datetime.now(UTC))


def refused(*words: str) -> None:
    with pytest.raises(ArchiveDamaged) as caught:
        cut()
    told = f"{caught.value.message} {caught.value.detail_next_step}"
    assert all(word in told for word in words), told


def test_a_lost_manifest_that_the_documents_know_does_not_shorten_the_log(store: FaultyStore) -> None:
    newest = branches_in(store, label_of(store, not_done=""))[0]
    saved(store, newest)
    assert cut().points[0].mark == 3
    del store.objects[newest.name]
    refused(manifest_name(0, 2), "ids up to 3", "--each-as-far-as-it-goes")
    assert cut(End(latest=True, each=True)).points[0].mark == 1


def test_a_lost_timeline_that_the_documents_know_is_not_taken_for_the_one_before(store: FaultyStore) -> None:
    lineage = forked(SECOND, 2)
    saved(store, begun(store, lineage))
    assert cut().points[0].mark == 2
    del store.objects[begin_name(0, SECOND)]
    refused(manifest_name(0, 1, SECOND), "is not in the store")
    assert cut(End(latest=True, timelines=("0=1",))).points[0].mark == 3, "an operator chose it"


def test_a_lost_manifest_of_the_newest_timeline_is_not_made_up_for_by_the_one_before(store: FaultyStore) -> None:
    newest = begun(store, forked(SECOND, 2))
    archive = PartitionArchive(store, label_of(store, not_done=""), 0, SECOND)
    piece = next(iter(archive.last_piece(one) for one in branches_in(store, archive.label)[:1]))
    saved(store, newest.extended(piece)[0])
    refused(manifest_name(0, 2, SECOND), "ids up to 3", "is not in the store")
    assert cut(End(latest=True, each=True)).points[0].mark == 2


@pytest.mark.parametrize("left", ["tail.json", "tail/0"])
def test_a_timeline_of_which_only_unsealed_records_are_left_is_not_overlooked(store: FaultyStore, left: str) -> None:
    store.put_new(f"{folder_of(0, SECOND)}/{left}", b"")
    refused(begin_name(0, SECOND), "is not in the store")
    with pytest.raises(ArchiveDamaged, match=r"begin\.json is not in the store"):
        branches_in(store, label_of(store, not_done=""), [0])
    assert begin_name(0, SECOND) in [flaw.name for flaw in survey(store).flaws]
    assert unsealed_index_name(0, SECOND) == f"{folder_of(0, SECOND)}/tail.json"


@pytest.mark.parametrize("is_later", [False, True])
def test_timelines_of_two_logs_are_refused_and_named(store: FaultyStore, is_later: bool) -> None:
    begun(store, forked(SECOND, 2))
    begun(store, forked(UUID(int=4), 1, forked(OTHER, 2)) if is_later else forked(OTHER, 2))
    (wrong,) = survey(store).flaws
    assert "of another log" in wrong.detail
    refused(wrong.name, "of another log", "move the folder")
    with pytest.raises(ArchiveDamaged, match="of another log"):
        branches_in(store, label_of(store, not_done=""))


def test_a_timeline_that_continues_all_others_is_taken(store: FaultyStore) -> None:
    lineage = forked(SECOND, 2)
    begun(store, lineage)
    begun(store, forked(OTHER, 2, lineage))
    assert (survey(store).flaws, cut().points[0].mark) == ([], 2)


@pytest.mark.parametrize(("fork", "mark"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_timeline_that_is_not_backed_up_yet_ends_with_what_those_before_have(
    store: FaultyStore, fork: int, mark: int
) -> None:
    """It takes over whole segments. What is behind these up to the fork is in the store as well."""
    newest = begun(store, forked(SECOND, fork))
    assert newest.last == {0: -1, 1: 1, 2: 1}.get(fork, 3)
    source = source_at("there")
    assert source.cut_at(LATEST, datetime.now(UTC)).points[0].mark == mark
    assert source.lineage(0).current == SECOND, "the restored log continues behind all timelines"
    chosen = End(latest=True, timelines=("0=2",))
    if newest.number:
        assert cut(chosen).points[0].mark == newest.last, "an operator chose it"


def test_documents_of_another_log_are_refused(store: FaultyStore) -> None:
    newest = begun(store, forked(SECOND, 2))
    saved(store, newest, forked(OTHER, 2))
    refused("and those in the saved documents, up to 2, are of two logs", folder_of(0, SECOND))


def test_a_log_that_the_cluster_never_had_is_named(store: FaultyStore) -> None:
    saved(store, branches_in(store, label_of(store, not_done=""))[0])
    uploaded(store, 7)
    with pytest.raises(BadArgument, match="the cluster in the store has 8 or more") as caught:
        of_size(source_at("there"), 1)
    assert "`partition-7` into the store: its documents have 1 partitions" in caught.value.detail_next_step
