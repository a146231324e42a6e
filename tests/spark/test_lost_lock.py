"""A run that has lost the lock of its output leaves what lies there to whoever holds it now."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs
from waltz_spark.export import destination, export
from waltz_spark.export.destination import Destination, newest_manifest
from waltz_spark.export.export import Run
from waltz_spark.export.manifest import LOCK, UNFINISHED
from waltz_spark.log.origin import Span

from tests.spark.exporting import KEY, Exporting
from tests.spark.growing import GrowingStorage
from waltzd.errors.operations import ExportHeld, StoreFailed


def test_a_run_that_lost_its_lock_removes_nothing_of_the_run_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "LEASE_SECONDS", 0.0)  # as if this process had not run for so long
    there = Destination(str(tmp_path), system=fs.LocalFileSystem())

    def runner(job: Any, given: Sequence[Any]) -> Generator[Any, None, None]:
        other = {"run": "other", "host": "elsewhere", "pid": 1, "until": 1e12}
        there.put(LOCK, json.dumps(other).encode())
        there.put(f"{UNFINISHED}/other/file", b"written, and not published yet")
        yield from ()
        raise StoreFailed("the store does not answer")

    assignment: Any = SimpleNamespace(number=0, partition=0, span=Span(0, 1))
    job: Any = SimpleNamespace(run="ours", destination=there, form=None)
    run = Run(job=job, before=None, assignments=[assignment])
    with pytest.raises(StoreFailed):
        run.carry_out(runner)
    assert there.read(f"{UNFINISHED}/other/file") == b"written, and not published yet"


def test_two_that_took_the_lock_at_the_same_moment_do_not_publish_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without a conditional put gives the lock to both, until the first renewal."""
    there = Destination(str(tmp_path / "out"), system=fs.LocalFileSystem())
    storage = GrowingStorage(tmp_path / "storage", key=KEY, partitions=1, assigned=[0])
    first = Exporting(storage=storage, destination=there)
    storage.append(0, [b"%d" % number for number in range(200)])
    second = first.prepared()

    def runner(job: Any, given: Sequence[Any]) -> Generator[Any, None, None]:
        storage.append(0, [b"more"] * 5)  # the first one finds more in the log
        with monkeypatch.context() as patched:
            patched.setattr(destination._Lease, "_is_over", lambda *_: True)  # it looked before the second one had written
            first.export()
        yield from first.tasks(job, given)

    monkeypatch.setattr(export, "PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(export, "PUBLISH_SHARE", math.inf)
    with pytest.raises(ExportHeld):
        second.carry_out(runner)
    newest = newest_manifest(there)
    assert newest is not None
    assert newest.next_ids == {0: 205}
    assert first.export() == newest, "there is nothing more to export"
    first.check_proof(newest)
