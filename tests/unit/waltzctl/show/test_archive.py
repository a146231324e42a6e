"""`waltzctl archive status` for people: a table that fits a terminal, and the reasons below it."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from tests.archives import Uploads
from tests.batches import batches_of
from tests.simulation.faulty_store import FaultyStore
from waltzctl.records import archive, backup
from waltzctl.records.archive import Reaching, reaching
from waltzd.archive.listing import metadata_name
from waltzd.cluster.cluster import ARCHIVES, ROOT
from waltzd.cluster.documents import ArchiveMeta, ClusterMeta
from waltzd.cluster.metadata import SavedDocuments, write

LOST = "W2262 the archive cannot stand in for what would go: the object 00/segments/0000000000000000000-00.seg is gone"
WIDTH = 100


def reached(partition: int, *, trouble: str = "", missing: str = "") -> Reaching:
    return Reaching(
        partition=partition, archived=1_234_567_890, committed=1_234_599_999, floor=1_200_000_000, manifest=12_345,
        archive="8c1f1a52-5d0c-4f83-a1a5-7a1a5b1f0000", sha256="0" * 64, trouble=trouble, checked_ms=None, missing=missing,
    )  # fmt: skip


def drawn(*found: Reaching) -> list[str]:
    out = io.StringIO()
    reaching(found).draw(Console(file=out, width=WIDTH))
    return out.getvalue().splitlines()


def test_a_long_reason_stands_below_a_table_that_fits() -> None:
    lines = drawn(reached(0, trouble=LOST), reached(1, trouble=LOST), reached(2, missing="it is gone"))
    assert max(map(len, lines)) <= WIDTH
    text = " ".join(line.strip() for line in lines)
    assert f"partitions 0-1: the archive does not go on: {LOST}" in text
    assert "partition 2: the archive lacks what was in it: it is gone" in text


def test_programs_get_the_reason_of_each_partition() -> None:
    assert reaching([reached(0, trouble=LOST)]).document["partitions"][0]["trouble"] == LOST


def test_a_partition_whose_owner_is_silent_is_not_archived_for_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(*found: Reaching) -> int:
        monkeypatch.setattr(archive, "using", lambda *_: list(found))
        nobody: Any = SimpleNamespace(is_given=False)
        target: Any = SimpleNamespace(target=lambda: None)
        return archive.status(end=nobody, given=target, output="json")

    silent = replace(reached(1), committed=None)
    assert (status(reached(0)), status(reached(0), silent), status(silent, reached(0, trouble=LOST))) == (0, 7, 8)
    assert any(line.startswith("partition 1: no owner answers") for line in drawn(reached(0), silent))


@pytest.mark.parametrize("lost", [None, 1])
def test_a_partition_of_which_a_store_has_nothing_is_listed_as_lost(
    lost: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, key, archives = FaultyStore(), UUID(int=5), {}
    for number in range(2):
        uploads = Uploads(store, cluster=key, partition=number)
        uploads.batches(batches_of([[b"a"], [b"b"]], cuts=[1], partition=number))
        made = uploads.manifest
        archives[f"{ARCHIVES}/{number}"] = ArchiveMeta(
            archive=made.archive, number=made.number, sha256=made.sha256, last=made.last
        )
    meta = ClusterMeta(name="trial", key=key, partitions=2, created="2026-01-01")
    saved = SavedDocuments(moment="2026-01-01T00:00:00+00:00", documents={ROOT: meta, **archives})
    store.put_new(metadata_name(1), write(saved))
    for name in [name for name in store.objects if name.startswith(f"partition-{lost}/")]:
        del store.objects[name]
    monkeypatch.setattr(backup, "open_archive", lambda _place: store)
    found = backup._fetch("store", None)
    assert [one.backed_up for one in found.partitions] == [1, -1 if lost else 1]
    assert found.is_behind(60) is (lost is not None)
