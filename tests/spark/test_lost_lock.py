"""A run that has lost the lock of its output leaves what lies there to whoever holds it now."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from pyarrow import fs
from waltz_spark.exporting import remote_destination
from waltz_spark.exporting.export import Run
from waltz_spark.exporting.manifest import LOCK, PLANS
from waltz_spark.exporting.remote_destination import RemoteDestination
from waltz_spark.log.origin import Span

from waltzd.errors import StoreFailed


def test_a_run_that_lost_its_lock_removes_nothing_of_the_run_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_destination, "LEASE_SECONDS", 0.0)  # as if this process had not run for so long
    there = RemoteDestination(str(tmp_path), system=fs.LocalFileSystem())

    def runner(name: str, given: Sequence[Any]) -> Generator[Any, None, None]:
        other = {"run": "other", "host": "elsewhere", "pid": 1, "until": 1e12}
        there._put(LOCK, json.dumps(other).encode())
        there._put(f"{PLANS}/other.json", json.dumps({"run": "other", "paths": ["partition=0/other.parquet"]}).encode())
        there._put("partition=0/other.parquet", b"named, and not published yet")
        yield from ()
        raise StoreFailed("the store does not answer")

    shape: Any = None
    assignment: Any = SimpleNamespace(number=0, partition=0, span=Span(0, 1))
    run = Run(
        destination=there,
        before=None,
        cluster=UUID(int=1),
        shape=shape,
        source="a test",
        assignments=[assignment],
        paths=["partition=0/ours.parquet"],
        watch=lambda written: None,
    )
    with pytest.raises(StoreFailed):
        run.carry_out(runner)
    assert there.read(f"{PLANS}/other.json") is not None
    assert there.read("partition=0/other.parquet") == b"named, and not published yet"
