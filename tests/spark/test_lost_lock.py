"""A run that has lost the lock of its output leaves what lies there to whoever holds it now."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs
from waltz_spark.export import destination
from waltz_spark.export.destination import Destination
from waltz_spark.export.export import Run
from waltz_spark.export.manifest import LOCK, UNFINISHED
from waltz_spark.log.origin import Span

from waltzd.errors.operations import StoreFailed


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
