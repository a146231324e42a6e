"""A storage directory under a random workload, crashed in front of every single operation on its disk.

One seed decides the workload, the sizes and the losses. Before each operation of the simulated disk the run takes a copy
of the disk, cuts its power (or kills only the process), opens the copy and compares it with a model that is a plain list
of records: everything acknowledged is there, nothing that was not sent is there, the marks are ones that were said, every
index is right, and writing goes on. The copy's own opening is crashed again now and then.

In format 1 the model is a list of batches besides: a log ends with a whole one, and after each start every file is the one
that any other replica has, its footer included.

Run many seeds with `./dev crash-test --workloads 5000`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from uuid import UUID

import numpy as np

from tests.batches import segments_of
from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import records_of
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.format.batch import Batch
from waltzd.format.index import IndexChecker
from waltzd.format.layout import HEADER_BYTES, FileHeader, index_entries, segment_name
from waltzd.format.record import Run, encode_payloads
from waltzd.format.scan import survey
from waltzd.format.span import Span
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings

KEY = UUID(int=0xA11CE)
ROOT = "storage"
PARTITIONS = 2


class PowerLost(BaseException):
    """Raised out of a disk operation to crash the operation that is under way."""


@dataclass
class Model:
    """What was said to one replica, and what it said back."""

    acked: list[bytes] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    """The acknowledged records, then those of the call under way."""
    cut_to: int | None = None
    """A truncation under way: the log may already be this short."""
    promised: int = -1
    promising: int = -1
    low_marks: set[int] = field(default_factory=lambda: {-1})
    committed: int = -1
    incarnation: UUID | None = None

    @property
    def shortest(self) -> int:
        """The lowest last id that the replica may show."""
        return len(self.acked) - 1 if self.cut_to is None else min(self.cut_to, len(self.acked) - 1)


@dataclass
class Report:
    workloads: int = 0
    crashes: int = 0
    damaged: int = 0
    """Scattered losses that left a hole above everything acknowledged, and were reported as such."""


def read_all(partition: Partition, last_id: int) -> list[bytes]:
    out: list[bytes] = []
    while len(out) <= last_id:
        run = partition.read_examined(len(out), last_id, 1 << 16)
        out += [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
    return out


def check_indexes(disk: SimDisk, partition: Partition) -> None:
    for entry in disk.list(partition.directory):
        if not entry.name.endswith(".seg"):
            continue
        first_id = int(entry.name[:-4])
        data = disk.open(f"{partition.directory}/{entry.name}")
        index = disk.open(f"{partition.directory}/{entry.name[:-4]}.idx")
        checker = IndexChecker(index, first_id)
        version = FileHeader.decode(data.read(0, HEADER_BYTES), data.path).version

        def compare(span: Span, checker: IndexChecker = checker) -> None:
            checker.add(span.first_id, span.entries)

        found = survey(data, first_id=first_id, end=data.size(), version=version, on_span=compare)
        assert checker.is_right, f"{entry.name}: wrong index entry"
        assert found.tail_bytes == 0, f"{entry.name}: bytes left at the end"
        if not found.gaps:
            assert index_entries(index.size()) == found.next_id - first_id, f"{entry.name}: index of another length"


class CrashRun:
    def __init__(self, seed: int, *, every: int = 1) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.every = every
        self.report = Report(workloads=1)
        self.disk = SimDisk(seed)
        self.disk.make_directory(ROOT)
        self.disk.flush_directory("")
        self.settings = PartitionSettings(segment_bytes_max=self.random.choice([300, 700, 2000, 5000]))
        self.models: dict[int, Model] = {}
        self.directory = self.open(self.disk)

    def open(self, disk: SimDisk) -> Directory:
        return Directory.open(disk, ROOT, key=KEY, partitions=PARTITIONS, settings=self.settings, reserve_bytes=1000)

    # -- the workload

    def run(self, operations: int) -> Report:
        self.disk.observer = self.crash
        for _ in range(operations):
            self.step()
        self.disk.observer = None
        return self.report

    def step(self) -> None:
        number = self.random.randrange(PARTITIONS)
        if number not in self.models:
            self.create(number)
            return
        choice = self.random.random()
        if choice < 0.45:
            self.append(number)
        elif choice < 0.55:
            self.install(number)
        elif choice < 0.65:
            self.directory.partition(number).checkpoint()
        elif choice < 0.75:
            self.new_session(number)
        elif choice < 0.85:
            self.truncate(number)
        elif choice < 0.90:
            self.send_again(number)
        elif choice < 0.97:
            self.restart(clean=self.random.random() < 0.5)
        else:
            self.remove(number)

    def create(self, number: int) -> None:
        # Unassigned until the call returns; what a crash leaves of it must not stand in the way.
        incarnation = self.directory.create_partition(number).status().incarnation
        self.models[number] = Model(incarnation=incarnation)
        self.new_session(number)

    def remove(self, number: int) -> None:
        del self.models[number]
        self.directory.remove_partition(number, delete_files=self.random.random() < 0.5)

    def new_session(self, number: int) -> None:
        model, partition = self.models[number], self.directory.partition(number)
        model.promising = model.promised + self.random.randrange(1, 4)
        partition.open_session(model.promising)
        model.promised = model.promising
        if self.random.random() < 0.7:
            low_mark = partition.last_id
            model.low_marks.add(low_mark)
            partition.set_low_mark(model.promised, low_mark)
            model.low_marks = {low_mark}

    def make_runs(self, first_id: int) -> list[Run]:
        runs: list[Run] = []
        for _ in range(self.random.randrange(1, 4)):
            sizes = [self.random.choice([0, 3, 40, 200, 900]) for _ in range(self.random.randrange(1, 6))]
            runs.append(encode_payloads(first_id, [self.random.randbytes(size) for size in sizes]))
            first_id += len(sizes)
        return runs

    def append(self, number: int) -> None:
        model, partition = self.models[number], self.directory.partition(number)
        runs = self.make_runs(len(model.acked))
        for run in runs:
            model.sent += [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
        last_id = partition.append(model.promised, runs, self.random.randrange(-1, len(model.acked) + 1))
        assert last_id == len(model.sent) - 1
        model.acked = list(model.sent)
        model.committed = max(model.committed, partition.committed)

    def install(self, number: int) -> None:
        """The next records as a segment file."""
        model, partition = self.models[number], self.directory.partition(number)
        runs = self.make_runs(len(model.acked))
        for run in runs:
            model.sent += [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
        first_id = len(model.acked)
        header = FileHeader(created_ms=5, key=KEY, partition=number, first_id=first_id)
        installation = partition.begin_installation(model.promised, first_id, 0)
        for piece in (header.encode(), *(bytes(run.data) for run in runs)):
            installation.write(piece)
        installation.prove()
        assert partition.install(model.promised, installation).last_id == len(model.sent) - 1
        installation.abandon()
        model.acked = list(model.sent)

    def send_again(self, number: int) -> None:
        """The same records under the same ids: acknowledged again, nothing written."""
        model, partition = self.models[number], self.directory.partition(number)
        if model.acked:
            first_id = self.random.randrange(len(model.acked))
            run = partition.read_examined(first_id, len(model.acked) - 1, 500)
            assert partition.append(model.promised, [run], -1) == len(model.acked) - 1

    def truncate(self, number: int) -> None:
        model, partition = self.models[number], self.directory.partition(number)
        status = partition.status()
        if status.session == model.promised:
            model.promising = model.promised + 1
            partition.open_session(model.promising)
            model.promised = model.promising
        floor = max(status.low_mark, partition.committed)
        if floor < len(model.acked) - 1:
            mark = self.random.randrange(floor, len(model.acked))
            model.cut_to = self.lands_on(number, mark)
            partition.truncate(model.promised, mark)
            self.cut(number, model.cut_to)

    def lands_on(self, number: int, mark: int) -> int:
        """Where a cut above `mark` ends."""
        return mark

    def cut(self, number: int, mark: int) -> None:
        model = self.models[number]
        model.cut_to = None
        del model.acked[mark + 1 :]
        model.sent = list(model.acked)

    def restart(self, *, clean: bool) -> None:
        if clean:
            self.directory.close()
        else:
            self.disk.kill()
        self.directory = self.open(self.disk)

    # -- the crashes

    def crash(self, kind: str, path: str) -> None:
        if kind == "read" or self.random.random() * self.every >= 1:
            return
        self.report.crashes += 1
        copy = self.disk.clone(self.random.getrandbits(32))
        loss = self.lose(copy)
        if self.random.random() < 0.1:
            again = self.crash_opening(copy)
            loss = Loss.SCATTERED if Loss.SCATTERED in (loss, again) else loss
        try:
            self.compare(copy, loss)
        except AssertionError as error:
            raise AssertionError(
                f"seed {self.seed}, step {self.disk.steps} ({kind} {path}), {loss.value if loss else 'kill'}: {error}"
            ) from error

    def lose(self, disk: SimDisk) -> Loss | None:
        choice = self.random.random()
        if choice < 0.1:
            disk.kill()
            return None
        loss = Loss.ORDERED if choice < 0.7 else Loss.SCATTERED
        disk.power_cut(loss)
        return loss

    def crash_opening(self, disk: SimDisk) -> Loss | None:
        steps = disk.steps + self.random.randrange(1, 40)

        def stop(kind: str, path: str) -> None:
            if disk.steps >= steps:
                raise PowerLost

        disk.observer = stop
        try:
            self.open(disk)
        except PowerLost:
            disk.observer = None
            return self.lose(disk)
        disk.observer = None
        disk.kill()
        return None

    def compare(self, disk: SimDisk, loss: Loss | None) -> None:
        directory = self.open(disk)
        assigned = {partition.number for partition in directory.partitions()}
        assert set(self.models) <= assigned, f"partitions {sorted(self.models)} were created, {sorted(assigned)} are there"
        for number in sorted(self.models):
            partition = directory.partition(number)
            self.compare_one(disk, partition, self.models[number], loss)
        directory.close()

    def compare_one(self, disk: SimDisk, partition: Partition, model: Model, loss: Loss | None) -> None:
        status = partition.status()
        if status.findings:
            assert loss is Loss.SCATTERED, f"damage after a loss that leaves none: {status.findings[0].sentence()}"
            self.report.damaged += 1
            for finding in status.findings:
                assert finding.first_id is not None
                assert finding.first_id > model.shortest, f"acknowledged, and damaged: {finding.sentence()}"
        sound_to = min((f.first_id - 1 for f in status.findings if f.first_id is not None), default=status.last_id)
        assert sound_to >= model.shortest, f"ids up to {sound_to} are there, {model.shortest} was acknowledged"
        assert sound_to < len(model.sent), f"id {sound_to} is there, {len(model.sent) - 1} was the last one sent"
        found = read_all(partition, sound_to)
        assert found == model.sent[: len(found)], "a record has other bytes than were sent"
        assert model.promised <= status.promised_session <= model.promising
        assert status.low_mark in model.low_marks
        assert status.findings or status.incarnation == model.incarnation, "it takes itself for a copy"
        assert status.committed <= len(model.acked) - 1
        if not status.findings:
            check_indexes(disk, partition)
            self.check_files(disk, partition)
        self.go_on(partition, sound_to)

    def check_files(self, disk: SimDisk, partition: Partition) -> None:
        """Other replicas of format 0 begin their segments elsewhere."""

    def go_on(self, partition: Partition, sound_to: int) -> None:
        """The next owner cuts what is doubtful and writes."""
        session = partition.promised_session + 1
        status = partition.open_session(session)
        partition.truncate(session, max(sound_to, status.low_mark, status.committed))
        partition.set_low_mark(session, partition.last_id)
        run = encode_payloads(sound_to + 1, [b"after the crash"])
        assert partition.append(session, [run], sound_to) == sound_to + 1
        assert partition.read_examined(sound_to + 1, sound_to + 1, 100).data == run.data


class BatchCrashRun(CrashRun):
    """The same in format 1. A replica may begin in format 0 and go over."""

    def __init__(self, seed: int, *, every: int = 1) -> None:
        super().__init__(seed, every=every)
        self.logs: dict[int, BatchLog] = {}
        """What is acknowledged."""
        self.sending: list[Batch] = []
        """By the call under way."""

    def create(self, number: int) -> None:
        self.logs[number] = BatchLog(self.random, segment_bytes_max=self.random.choice([300, 2000, 8000]), partition=number)
        super().create(number)

    def make_batches(self, number: int) -> list[Batch]:
        self.sending = self.logs[number].draw(self.random.randrange(1, 4))
        for batch in self.sending:
            self.models[number].sent += records_of(batch.run)
        return self.sending

    def took(self, number: int) -> None:
        model, log = self.models[number], self.logs[number]
        log.batches, self.sending = [*log.batches, *self.sending], []
        model.acked = list(model.sent)

    def append(self, number: int) -> None:
        model, partition, log = self.models[number], self.directory.partition(number), self.logs[number]
        committed = self.random.choice(log.marks())
        if not log.batches and self.random.random() < 0.3:
            runs = self.make_runs(len(model.acked))
            model.sent += [record for run in runs for record in records_of(run)]
            partition.append(model.promised, runs, committed)
            log.first += runs
            self.took(number)
        else:
            new = self.make_batches(number)
            assert partition.append(model.promised, new, committed) == new[-1].last_id
            self.took(number)
        model.committed = max(model.committed, partition.committed)

    def install(self, number: int) -> None:
        """Behind a segment that is full, or of format 0."""
        model, partition, log = self.models[number], self.directory.partition(number), self.logs[number]
        if log.end is not None and log.end.segment_bytes:
            self.append(number)
            return
        new = segments_of(self.make_batches(number))[0]
        self.sending = new
        model.sent = model.acked + [record for batch in new for record in records_of(batch.run)]
        content = BatchLog(self.random, partition=number, batches=[*log.batches, *new]).files(KEY)
        installation = partition.begin_installation(model.promised, new[0].first_id, 0)
        installation.write(content[segment_name(new[0].first_id)])
        installation.prove()
        assert partition.install(model.promised, installation).last_id == new[-1].last_id
        installation.abandon()
        self.took(number)

    def send_again(self, number: int) -> None:
        model, partition, log = self.models[number], self.directory.partition(number), self.logs[number]
        if log.batches:
            again = log.batches[self.random.randrange(len(log.batches)) :][:2]
            assert partition.append(model.promised, again, -1) == log.last_id

    def lands_on(self, number: int, mark: int) -> int:
        return self.logs[number].lands_on(mark)

    def cut(self, number: int, mark: int) -> None:
        super().cut(number, mark)
        self.logs[number].cut(mark)

    def check_files(self, disk: SimDisk, partition: Partition) -> None:
        log = self.log_of(partition)
        assert partition.last_id in log.marks(), f"id {partition.last_id} is there, and its batch is not"
        log.cut(partition.last_id)
        log.check_files(disk, partition.directory, KEY)

    def log_of(self, partition: Partition) -> BatchLog:
        log = self.logs[partition.number]
        is_sending = self.sending and len(self.models[partition.number].sent) > len(self.models[partition.number].acked)
        batches = [*log.batches, *(self.sending if is_sending else ())]
        return replace(log, random=random.Random(self.disk.steps), batches=batches, first=self.first_of(partition.number))

    def first_of(self, number: int) -> list[Run]:
        """Those of format 0 that are on their way count one by one."""
        log, sent = self.logs[number], self.models[number].sent
        if log.batches or self.sending:
            return list(log.first)
        return [Run(id_, memoryview(raw), np.array([0, len(raw)])) for id_, raw in enumerate(sent)]

    def go_on(self, partition: Partition, sound_to: int) -> None:
        session = partition.promised_session + 1
        status = partition.open_session(session)
        partition.truncate(session, max(sound_to, status.low_mark, status.committed))
        partition.set_low_mark(session, partition.last_id)
        log = self.log_of(partition)
        log.cut(sound_to)
        log.batches += log.draw(3)
        assert partition.append(session, log.batches[-3:], sound_to) == log.last_id
        log.check(partition)


def run_seed(seed: int, *, operations: int = 14, every: int = 1, version: int = 0) -> Report:
    return (BatchCrashRun if version else CrashRun)(seed, every=every).run(operations)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev crash-test", description=__doc__)
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--format", type=int, choices=(0, 1), default=0)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    total = Report()
    seeds = range(options.first_seed, options.first_seed + options.workloads)
    with get_context("spawn").Pool(options.jobs) as pool:
        for report in pool.imap_unordered(partial(run_seed, version=options.format), seeds, chunksize=8):
            total.workloads += report.workloads
            total.crashes += report.crashes
            total.damaged += report.damaged
            if total.workloads % 100 == 0:
                print(f"{total.workloads} workloads, {total.crashes} crashes", file=sys.stderr, flush=True)
    print(
        f"{total.workloads} workloads (seeds {seeds[0]} to {seeds[-1]}), {total.crashes} crashes, all compared: "
        f"no violation; {total.damaged} scattered losses reported as damage above what was acknowledged; "
        f"{time.monotonic() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
