"""An export of a storage's directory as `waltzctl spark-export` makes it, without Spark: its tasks run here, one by one."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from waltz_spark.export.delta import DeltaTable
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import Run, check_history, has_leftovers, planned, recover, stray_files, wanted
from waltz_spark.export.form import Form, form_of, read_batches
from waltz_spark.export.manifest import Manifest
from waltz_spark.export.tasks import Assignment, Job, Written, write
from waltz_spark.export.verification import Checked, check_files, check_log
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.origin import Throttle
from waltz_spark.log.selection import EARLIEST, LATEST, Bound, Selection
from waltz_spark.payloads.decoders import Decoder, decoder_of
from waltz_spark.table.columns import record_batch

from tests.spark.growing import GrowingStorage

KEY = UUID(int=77)
CREATED_MS = 1_700_000_000_000


def selected(
    *,
    partitions: tuple[int, ...] | None = None,
    first: Mapping[int, int] | None = None,
    last: Mapping[int, int] | None = None,
    first_of_others: int = EARLIEST,
    last_of_others: int | None = None,
) -> Selection:
    """From first to last ids, both included."""
    ends = {number: id_ + 1 for number, id_ in (last or {}).items()}
    end = LATEST if last_of_others is None else last_of_others + 1
    starting = Bound(others=first_of_others, named=first or {})
    return Selection(partitions=partitions, starting=starting, ending=Bound(others=end, named=ends))


def tasks(job: Job, assignments: Sequence[Assignment]) -> Generator[Written, None, None]:
    """Here, one after the other; what they tell travels as it does from an executor."""
    for given in assignments:
        yield pickle.loads(pickle.dumps(write(job, given)))  # noqa: S301 - our own


@dataclass(kw_only=True)
class Exporting:
    """An export of one directory, run after run."""

    storage: GrowingStorage
    destination: Any
    form: Form = field(default_factory=lambda: form_of("parquet", None))
    decoder: Decoder | None = None
    file_data_bytes: int | None = 3000
    bytes_per_second: int | None = None
    table: DeltaTable | None = None
    allows_uncommitted: bool = False
    more: tuple[str, ...] = ()
    """Other storages that hold the log, too."""

    @property
    def origin(self) -> DirectoryOrigin:
        storages = (str(self.storage.directory), *self.more)
        return DirectoryOrigin(storages=storages, allows_uncommitted=self.allows_uncommitted)

    def prepared(self, asked: Selection | None = None) -> Run:
        asked = asked or Selection()
        recover(self.destination, "recovery")
        origin, before = self.origin, newest_manifest(self.destination)
        catalog = origin.catalog(asked.partitions)
        check_history(origin, catalog, before, self.destination.place)
        spans = wanted(catalog, before, asked)
        assignments = planned(catalog, spans, file_data_bytes=self.file_data_bytes)
        job = Job(
            origin=origin, destination=self.destination, cluster=catalog.key, timelines=catalog.timelines,
            form=self.form, decoder=self.decoder, throttle=Throttle(self.bytes_per_second),
        )  # fmt: skip
        return Run(job=job, before=before, assignments=assignments, table=self.table)

    def tasks(self, job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        yield from tasks(replace(job, destination=self.destination), given)

    def export(self, asked: Selection | None = None) -> Manifest:
        found = self.prepared(asked).carry_out(self.tasks)
        assert found is not None
        return found

    def check_proof(self, manifest: Manifest) -> None:
        """The files are what the manifest says, and what the log has under these ids, and nothing else is there."""
        log = check_log(self.origin, self.origin.catalog(), manifest)
        assert findings(check_files(self.destination, manifest)) == findings(log) == []
        assert stray_files(self.destination, manifest) == []
        assert not has_leftovers(self.destination)


def findings(checks: Iterable[Checked]) -> list[str]:
    return [checked.finding.detail for checked in checks if checked.finding]


def rows_in(destination: Any, manifest: Manifest) -> list[dict[str, Any]]:
    """The columns of the log in all files."""
    found = []
    for piece in manifest.pieces:
        with destination.open(piece.path) as file:
            found += [row for batch in read_batches(file, piece.path) for row in batch.select(SCHEMA.names).to_pylist()]
    return found


def rows_of(origin: DirectoryOrigin) -> list[dict[str, Any]]:
    """The log itself."""
    return [
        row
        for extent in origin.catalog().extents
        for run in origin.read(extent, extent.span, batch_bytes=1 << 20)
        for row in record_batch(run, extent.partition).to_pylist()
    ]


class Killed(BaseException):
    """Not an error: no code may catch it and go on."""


@dataclass
class Dying:
    """A table or a destination whose process dies before its operation number `left`: after that nothing happens."""

    inner: Any
    left: list[int]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("place", "hold", "is_on_this_machine") or not callable(found):
            return found

        def counted(*given: Any, **named: Any) -> Any:
            if self.left[0] <= 0:
                raise Killed
            self.left[0] -= 1
            return found(*given, **named)

        return counted


def export(
    output: Path,
    *storages: Path,
    partitions: tuple[int, ...] | None = None,
    last: dict[int, int] | None = None,
    first: dict[int, int] | None = None,
    decode: str = "",
) -> Manifest:
    """All that the directories hold, whether it is known to be committed or not; what the output has already is not
    exported again."""
    exporting = Exporting(
        storage=cast(GrowingStorage, SimpleNamespace(directory=storages[0])), more=tuple(map(str, storages[1:])),
        destination=LocalDestination(str(output)), allows_uncommitted=True,
        decoder=decoder_of(decode) if decode else None, file_data_bytes=None,
    )  # fmt: skip
    return exporting.export(selected(partitions=partitions, first=first, last=last))
