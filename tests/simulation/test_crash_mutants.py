"""The crash harness must be able to fail: an engine with one rule taken out is caught within a few seeds.

Each mutant breaks one promise of DESIGN's list (flush before acknowledging, names before relying on them, oldest last, …).
A mutant that survives means that the harness no longer looks where that promise is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.simulation.crash import run_seed
from tests.tiers import in_turns
from waltzd.disk.seam import join
from waltzd.disk.simulated import SimDisk, SimFile
from waltzd.errors import WaltzError
from waltzd.format.layout import index_name, segment_name
from waltzd.format.scan import Survey, Tail
from waltzd.storage.replica.hard_state import HardStateFile
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import BatchSegment, Segment, Suspect
from waltzd.storage.replica.segment_list import SegmentList

SEEDS = 40
EVERY = 3
"""One crash in three operations: most mutants fall within ten seeds."""

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__.replace("_", " ")] = patch
    return patch


@mutant
def acknowledges_before_the_data_is_flushed(patch: pytest.MonkeyPatch) -> None:
    def flush(self: Segment) -> None:
        self._flushed = (self.end, self.next_id)

    patch.setattr(Segment, "flush", flush)


@mutant
def answers_before_the_promise_is_flushed(patch: pytest.MonkeyPatch) -> None:
    def change(self: HardStateFile, **fields: Any) -> None:
        file, self._file = self._file, _Unflushed(self._file)  # type: ignore[assignment]
        try:
            right(self, **fields)
        finally:
            self._file = file

    right = HardStateFile.change
    patch.setattr(HardStateFile, "change", change)


class _Unflushed:
    def __init__(self, file: Any) -> None:
        self.write = file.write

    def flush(self) -> None: ...


@mutant
def relies_on_names_that_were_not_flushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimDisk, "flush_directory", lambda self, path: None)


@mutant
def acknowledges_a_session_before_the_control_file_is_flushed(patch: pytest.MonkeyPatch) -> None:
    def flush(self: SimFile) -> None:
        if not self.path.endswith(".ctl"):
            right(self)

    right = SimFile.flush
    patch.setattr(SimFile, "flush", flush)


@mutant
def marks_as_durable_what_is_not_flushed_yet(patch: pytest.MonkeyPatch) -> None:
    def append(self: Partition, session: int, runs: Any, committed: int) -> int:
        self.check_session(session)
        if runs and not self.findings and runs[0].first_id == self.last_id + 1:
            self._hard_state.change(durable=runs[-1].last_id)
        return right(self, session, runs, committed)

    right = Partition.append
    patch.setattr(Partition, "append", append)


@mutant
def cuts_the_oldest_segment_first(patch: pytest.MonkeyPatch) -> None:
    def cut(self: SegmentList, position: int, *, end: int, next_id: int) -> None:
        for first_id in self.first_ids[position + 1 :]:
            for name in (segment_name(first_id), index_name(first_id)):
                self._disk.remove(join(self._directory, name))
            self._disk.flush_directory(self._directory)
            self.forget()
        if len(self.first_ids) > position + 1:
            self.active = None
        del self.first_ids[position + 1 :]
        right(self, position, end=end, next_id=next_id)

    right = SegmentList.cut
    patch.setattr(SegmentList, "cut", cut)


@mutant
def writes_no_index_entries(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "write_index", lambda self, id_, offsets: None)


@mutant
def takes_a_torn_tail_for_damage(patch: pytest.MonkeyPatch) -> None:
    def judge(found: Survey, **known: Any) -> Tail:
        return Tail.DAMAGED if found.tail_bytes else Tail.CLEAN

    patch.setattr("waltzd.storage.replica.directory.judge_tail", judge)


@mutant
def leaves_a_torn_tail_where_it_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("waltzd.storage.replica.directory.judge_tail", lambda found, **known: Tail.CLEAN)


@mutant
def does_not_flush_what_it_cut(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Segment, *, end: int, next_id: int) -> None:
        self.data.truncate(end)
        self.stands_at(end=end, next_id=next_id)

    patch.setattr(Segment, "cut", cut)


@mutant
def forgets_that_a_cut_lowers_what_is_durable(patch: pytest.MonkeyPatch) -> None:
    def change(self: HardStateFile, **fields: Any) -> None:
        if fields.get("durable", self.value.durable) < self.value.durable:
            del fields["durable"]
        right(self, **fields)

    right = HardStateFile.change
    patch.setattr(HardStateFile, "change", change)


BATCH_MUTANTS: dict[str, Patch] = {}


def batch_mutant(patch: Patch) -> Patch:
    BATCH_MUTANTS[patch.__name__.replace("_", " ")] = patch
    return patch


for right_in_both in (
    acknowledges_before_the_data_is_flushed,
    writes_no_index_entries,
    takes_a_torn_tail_for_damage,
    leaves_a_torn_tail_where_it_is,
    does_not_flush_what_it_cut,
    forgets_that_a_cut_lowers_what_is_durable,
):
    batch_mutant(right_in_both)


@batch_mutant
def splits_a_batch_at_a_cut(patch: pytest.MonkeyPatch) -> None:
    def end_of(self: BatchSegment, id_: int) -> tuple[int, int]:
        batch = self.batch_with(id_)
        place = self.start_of(id_) + batch.head.lead
        return place + int(batch.run.bounds[id_ + 1 - batch.first_id]), id_ + 1

    patch.setattr(BatchSegment, "end_of", end_of)


@batch_mutant
def leaves_the_footer_behind_a_cut(patch: pytest.MonkeyPatch) -> None:
    def cut(self: BatchSegment, *, end: int, next_id: int) -> None:
        footer = self.data.read(self.end, 1 << 20)
        right(self, end=end, next_id=next_id)
        self.data.write(end, footer)
        self.data.flush()

    right = BatchSegment.cut
    patch.setattr(BatchSegment, "cut", cut)


@batch_mutant
def makes_no_footer_at_a_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "stand", lambda self: None)


@batch_mutant
def goes_on_from_the_batch_that_was_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentList, "refresh_end", lambda self: None)


@batch_mutant
def begins_a_segment_before_the_footer_of_the_one_in_front(patch: pytest.MonkeyPatch) -> None:
    def finish(self: SegmentList) -> None:
        active = self.active
        if isinstance(active, BatchSegment) and active.is_full:
            active.has_footer = True

    patch.setattr(SegmentList, "finish", finish)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def seed_that_catches(version: int = 0) -> int | None:
    for seed in range(SEEDS):
        try:
            run_seed(seed, every=EVERY, version=version)
        except (AssertionError, WaltzError, Suspect):  # something lost, a refused opening, a record that is not found
            return seed
    return None


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_harness_catches_an_engine_that(name: str, patch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](patch)
    assert seed_that_catches() is not None, f"{SEEDS} seeds found nothing wrong with an engine that {name}"


@pytest.mark.parametrize("name", in_turns(sorted(BATCH_MUTANTS), of=2))
def test_the_harness_of_batches_catches_an_engine_that(name: str, patch: pytest.MonkeyPatch) -> None:
    BATCH_MUTANTS[name](patch)
    assert seed_that_catches(1) is not None, f"{SEEDS} seeds found nothing wrong with an engine that {name}"


def test_the_harness_finds_nothing_wrong_with_the_engine_as_it_is() -> None:
    for seed in range(8):
        assert run_seed(seed, every=EVERY).crashes > 0
