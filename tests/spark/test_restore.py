"""Segments out of a lossless export: the same bytes under the same names, or an error before anything has its name."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from waltz_spark.exporting.destination import LocalDestination, the_manifest
from waltz_spark.exporting.manifest import Manifest
from waltz_spark.restoring import restore

from tests.spark.batches import Log, mixed_log
from tests.spark.exporting import export
from tests.spark.telling import run_examples
from waltzctl.main import run
from waltzd.disk.real import RealDisk
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import (
    AlreadyThere,
    ArchiveUnfit,
    DiskFull,
    ExportDamaged,
    NoSuchPartition,
    SegmentIncomplete,
    WaltzError,
)
from waltzd.format.layout import NEW_SUFFIX, FileHeader, segment_name


@pytest.fixture(scope="module")
def source(original: Path) -> Path:
    return original / "storage0"


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not change."""
    output = tmp_path_factory.mktemp("archive") / "export"
    export(output, source)
    return output


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.???") if path.is_file()}


def segments_in(directory: Path) -> dict[str, bytes]:
    """Those with records: an export has no word about a segment without any."""
    found = {name: raw for name, raw in files_of(directory).items() if name.endswith((".seg", ".idx"))}
    return {name: raw for name, raw in found.items() if len(raw) > 128}


def carry_out(archive: Path, directory: str | Path, found: Manifest | None = None) -> list[restore.Restored]:
    place = LocalDestination(str(archive))
    found = found or the_manifest(place)
    segments = restore.segments_of(found)
    return list(restore.restore(place, found, segments, RealDisk(), str(directory), lambda done, total: None))


def test_every_file_comes_back_byte_for_byte(
    archive: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "restored"
    assert run(["archive", "restore", str(archive), str(target), "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = segments_in(target)
    assert found == segments_in(source)
    assert len(found) > 20
    assert sum(part["segments"] for part in said["partitions"].values()) == len(found) / 2
    assert sum(part["bytes"] for part in said["partitions"].values()) == sum(map(len, found.values()))
    assert run(["verify-segments", "-j", "1", *sorted(str(path) for path in target.iterdir() if path.is_dir())]) == 0
    assert run(["verify-segments", "-j", "1", str(target / "0" / "0000000000000000000.seg")]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_segments_of_both_formats_come_back_byte_for_byte(tmp_path: Path, seed: int) -> None:
    """Footers, too; in several runs, whose files may end within a segment."""
    for partition in (0, 1):
        log = mixed_log(tmp_path / "storage" / str(partition), 10 * seed + partition, partition=partition)
        output = tmp_path / "export"
        ends = [batch.last_id for batch in log.batches]
        for last in sorted(log.chance.choices(ends, k=seed)):
            export(output, tmp_path / "storage", partitions=(partition,), last={partition: last})
        export(output, tmp_path / "storage", partitions=(partition,))
    carry_out(output, tmp_path / "restored")
    found = segments_in(tmp_path / "restored")
    assert found == segments_in(tmp_path / "storage")
    assert sum(raw.endswith(b"WZFE") for raw in found.values()) > 5
    done = carry_out(output, tmp_path / "restored")
    assert all(one.was_there for one in done)
    path = max((tmp_path / "restored" / "0").glob("*.seg"))
    raw = bytearray(path.read_bytes())
    raw[180] ^= 1
    path.write_bytes(raw)
    with pytest.raises(AlreadyThere):
        carry_out(output, tmp_path / "restored")


def test_an_archive_of_format_1_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    log = Log(directory=tmp_path / "storage" / "0", segment_bytes_max=1500)
    for count in (3, 5, 2, 7, 30, 2):
        log.add(count, groups=(2,))
    output = tmp_path / "export"
    found = export(output, tmp_path / "storage")
    piece = next(piece for piece in found.pieces if piece.fronts is not None and piece.fronts.footer)
    fronts, segment = piece.fronts, piece.segment
    assert fronts is not None
    assert segment is not None
    assert segment.format == 1

    def restored(**changes: object) -> None:
        changed = replace(piece, **changes)  # type: ignore[arg-type]
        pieces = tuple(changed if each is piece else each for each in found.pieces)
        carry_out(output, tmp_path / f"restored-{len(list(tmp_path.iterdir()))}", replace(found, pieces=pieces))

    restored()
    with pytest.raises(ExportDamaged, match="contradict each other"):
        restored(fronts=None)
    plain = FileHeader(created_ms=1, key=found.cluster, partition=0, first_id=segment.first).encode()
    with pytest.raises(ExportDamaged, match="contradict each other"):
        restored(segment=replace(segment, header=plain))
    with pytest.raises(ExportDamaged, match="do not make up the footer"):
        restored(fronts=replace(fronts, footer=bytes(64)))
    with pytest.raises(ExportDamaged, match="times, groups or locks"):
        restored(beside=1)


def test_an_export_that_ends_within_a_batch_does_not_come_back(tmp_path: Path) -> None:
    log = Log(directory=tmp_path / "storage" / "0")
    log.add(5)
    log.add(9)
    output = tmp_path / "export"
    export(output, tmp_path / "storage", last={0: 7})
    with pytest.raises(SegmentIncomplete, match="middle of a batch"):
        carry_out(output, tmp_path / "restored")
    export(output, tmp_path / "storage")
    carry_out(output, tmp_path / "restored")
    assert segments_in(tmp_path / "restored") == segments_in(tmp_path / "storage")


def test_what_a_person_sees(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "restored"
    arguments = ["archive", "restore", str(archive), str(target), "--partitions", "0-1"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"restored: \d+ segments, ", out)
    assert "an archive, not a replica" in out
    assert sorted(path.name for path in target.iterdir()) == ["0", "1", restore.MARKER]
    assert run(arguments) == 0
    before = [int(line.split()[5]) for line in capsys.readouterr().out.splitlines() if re.match(r" *\d+ ", line)]
    assert before == [len(list((target / number).glob("*.seg"))) for number in "01"]


def test_a_segment_that_has_grown_since_goes_into_the_same_file(source: Path, tmp_path: Path) -> None:
    """Two runs of an export, each with a part of one segment."""
    output, target = tmp_path / "export", tmp_path / "restored"
    export(output, source, partitions=(0,), last={0: 100})
    export(output, source, partitions=(0,), last={0: 250})
    found = export(output, source, partitions=(0,))
    assert len(found.pieces) == 5
    carry_out(output, target)
    assert segments_in(target) == {name: raw for name, raw in segments_in(source).items() if name.startswith("0/")}


def test_an_export_that_ends_inside_a_segment_gives_what_it_has(source: Path, tmp_path: Path) -> None:
    output, target = tmp_path / "export", tmp_path / "restored"
    export(output, source, partitions=(0,), last={0: 100})
    carry_out(output, target)
    whole = segments_in(source)
    for name, raw in segments_in(target).items():
        assert whole[name].startswith(raw)
    assert run(["verify-segments", "-j", "1", str(target / "0")]) == 0


class Cut(Exception):
    """The process ends here."""


@pytest.mark.parametrize("turn", range(0, 60, 4))
def test_a_restore_that_was_stopped_anywhere_goes_on(archive: Path, source: Path, tmp_path: Path, turn: int) -> None:
    """Stopped at each change of the directory in turn: no segment has its name before it is whole."""
    target = tmp_path / "restored"

    class Stopping(RealDisk):
        left = turn

        def _step(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise Cut

        def rename(self, old: str, new: str) -> None:
            self._step()
            super().rename(old, new)

        def flush_directory(self, path: str) -> None:
            self._step()
            super().flush_directory(path)

    place = LocalDestination(str(archive))
    found = the_manifest(place)
    segments = restore.segments_of(found)
    with contextlib.suppress(Cut):
        list(restore.restore(place, found, segments, Stopping(), str(target), lambda done, total: None))
    whole = segments_in(source)
    there = {name: raw for name, raw in segments_in(target).items() if name.endswith(".seg")}
    assert {name: whole[name] for name in there} == there
    done = carry_out(archive, target)
    assert sum(one.was_there for one in done) == len(there)
    assert segments_in(target) == whole
    assert not list(target.rglob(f"*{NEW_SUFFIX}"))


class StoppingDisk(SimDisk):
    left = 1 << 30

    def step(self, kind: str, path: str) -> Fault | None:
        self.left -= 1
        if self.left < 0:
            raise Cut
        return super().step(kind, path)


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize("turn", range(1, 220, 12))
def test_power_may_fail_anywhere(archive: Path, source: Path, turn: int, loss: Loss) -> None:
    disk = StoppingDisk(seed=turn)
    disk.make_directory("/data")
    disk.flush_directory("/")
    disk.left = turn
    place = LocalDestination(str(archive))
    found = the_manifest(place)
    segments = restore.segments_of(found)
    with pytest.raises(Cut):
        list(restore.restore(place, found, segments, disk, "/data/restored", lambda done, total: None))
    disk.left = 1 << 30
    disk.power_cut(loss)
    list(restore.restore(place, found, segments, disk, "/data/restored", lambda done, total: None))
    for name, raw in segments_in(source).items():
        assert disk.content(f"/data/restored/{name}") == raw, name


def changed(archive: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """A copy with one file whose rows were changed: its manifest is as it was."""
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    path = next(iter(sorted(copy.glob("partition-0-*.parquet"))))
    table = pq.read_table(path)
    pq.write_table(change(table), path)
    return copy


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def other_payload(table: pa.Table) -> pa.Table:
    values = table.column("data").to_pylist()
    at = next(number for number, value in enumerate(values) if value)
    return with_column(table, "data", [*values[:at], b"?" * len(values[at]), *values[at + 1 :]])


def other_header(table: pa.Table) -> pa.Table:
    values = table.column("header").to_pylist()
    return with_column(table, "header", [values[0] ^ 1, *values[1:]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_payload, "have the checksum .* and should have"),
        (other_header, "have the checksum .* and should have"),
        (lambda table: table.slice(0, table.num_rows - 1), "its records end before id"),
        (lambda table: table.slice(1), "it has id 1 where 0 has to be"),
        (lambda table: pa.concat_tables([table.slice(0, 1), table.slice(2)]), "do not follow each other"),
        (lambda table: table.drop_columns(["seq"]), "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_the_manifest_says(
    archive: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    copy = changed(archive, tmp_path, change)
    with pytest.raises((ExportDamaged, ArchiveUnfit), match=words):
        carry_out(copy, tmp_path / "restored")
    assert not list((tmp_path / "restored").rglob("*.seg"))


def test_a_file_that_is_missing(archive: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    next(copy.glob("partition-1-*.parquet")).unlink()
    with pytest.raises(WaltzError, match=r"partition-1-.*\.parquet"):
        carry_out(copy, tmp_path / "restored")


def test_exports_that_are_no_segments(archive: Path, source: Path, tmp_path: Path) -> None:
    found = the_manifest(LocalDestination(str(archive)))
    with pytest.raises(ArchiveUnfit, match="was made with --format parquet; only"):
        restore.segments_of(replace(found, shape=replace(found.shape, lossless=False)))
    with pytest.raises(ArchiveUnfit, match="not which segment it comes from"):
        restore.segments_of(replace(found, pieces=[replace(piece, segment=None) for piece in found.pieces]))
    with pytest.raises(NoSuchPartition, match="no partition 7, 9"):
        restore.segments_of(found, (0, 7, 9))
    heads = [piece.segment for piece in found.pieces]
    with pytest.raises(ExportDamaged, match="keeps the header of a segment of partition 0"):
        restore.segments_of(replace(found, pieces=[replace(piece, segment=heads[0]) for piece in found.pieces]))
    with pytest.raises(SegmentIncomplete, match="begins at id 190 is in the export from id 200 on only"):
        restore.segments_of(export(tmp_path / "late", source, partitions=(0,), first={0: 200}))


def test_replicas_that_cut_their_logs_differently(source: Path, tmp_path: Path) -> None:
    found = export(tmp_path / "export", source, partitions=(0,), last={0: 100})
    found = export(tmp_path / "export", source, partitions=(0,), last={0: 180})
    first, second = found.pieces
    assert second.segment is not None
    other = bytearray(second.segment.header)
    other[11] ^= 1  # another replica's time of creation
    mixed = [first, replace(second, segment=replace(second.segment, header=bytes(other)))]
    with pytest.raises(SegmentIncomplete, match="from id 101 on only"):
        restore.segments_of(replace(found, pieces=mixed))


def test_nothing_is_written_over(archive: Path, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(AlreadyThere, match="is not empty"):
        carry_out(archive, target)
    (target / "mine").unlink()
    carry_out(archive, target)
    path = target / "0" / "0000000000000000190.seg"
    raw = bytearray(path.read_bytes())
    raw[500] ^= 1
    path.write_bytes(raw)
    with pytest.raises(AlreadyThere, match=r"190\.seg or its index is there, and is not what"):
        carry_out(archive, target)
    assert path.read_bytes() == raw
    export(tmp_path / "another", source, partitions=(0,))
    with pytest.raises(AlreadyThere, match="another export was restored to"):
        carry_out(tmp_path / "another", target)


def test_no_link_leads_out_of_the_directory(archive: Path, tmp_path: Path) -> None:
    """Planted in the directory of a restore that was stopped."""
    target, elsewhere = tmp_path / "restored", tmp_path / "elsewhere"
    place = LocalDestination(str(archive))
    found = the_manifest(place)
    first = restore.restore(place, found, restore.segments_of(found), RealDisk(), str(target), lambda done, total: None)
    next(first)
    first.close()
    shutil.rmtree(target / "0")
    elsewhere.mkdir()
    (target / "0").symlink_to(elsewhere)
    with pytest.raises(AlreadyThere, match="restored/0 is there, and is no directory"):
        carry_out(archive, target)
    assert not list(elsewhere.iterdir())
    (target / "0").unlink()
    (target / "0").mkdir()
    precious = elsewhere / "precious"
    precious.write_text("mine")
    first_id = restore.segments_of(found)[0].head.first
    (target / "0" / f"{segment_name(first_id)}{NEW_SUFFIX}").hardlink_to(precious)
    carry_out(archive, target)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("at", [0, 100, 128, 135, 200, -1])
def test_a_damaged_index_does_not_count_as_whole(archive: Path, tmp_path: Path, at: int) -> None:
    target = tmp_path / "restored"
    carry_out(archive, target)
    path = target / "0" / "0000000000000000190.idx"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(AlreadyThere, match=r"190\.seg or its index is there, and is not what"):
        carry_out(archive, target)
    raw[at] ^= 1
    path.write_bytes(raw)
    assert all(one.was_there for one in carry_out(archive, target))


def test_two_at_once(archive: Path, tmp_path: Path) -> None:
    target = tmp_path / "restored"
    place = LocalDestination(str(archive))
    found = the_manifest(place)
    first = restore.restore(place, found, restore.segments_of(found), RealDisk(), str(target), lambda done, total: None)
    next(first)
    with pytest.raises(AlreadyThere, match="another process restores to"):
        carry_out(archive, target)
    first.close()
    assert sum(one.was_there for one in carry_out(archive, target)) == 1


def test_a_disk_without_room_is_noticed_before_the_first_segment(archive: Path, tmp_path: Path) -> None:
    class Small(RealDisk):
        def free_bytes(self, path: str) -> int:
            return 1000

    place = LocalDestination(str(archive))
    found = the_manifest(place)
    with pytest.raises(DiskFull, match="its file system has 1000"):
        list(restore.restore(place, found, restore.segments_of(found), Small(), str(tmp_path / "r"), lambda *_: None))
    assert not list((tmp_path / "r").glob("*/*"))


@pytest.mark.parametrize("loss", list(Loss))
def test_everything_is_on_the_disk_in_the_end(archive: Path, source: Path, loss: Loss) -> None:
    """After a loss of power, which takes what was not flushed, all of it is there."""
    disk = SimDisk()
    disk.make_directory("/data")
    disk.flush_directory("/")
    place = LocalDestination(str(archive))
    found = the_manifest(place)
    list(restore.restore(place, found, restore.segments_of(found), disk, "/data/restored", lambda done, total: None))
    disk.power_cut(loss)
    for name, raw in segments_in(source).items():
        file = disk.open(f"/data/restored/{name}")
        assert file.read(0, file.size()) == raw, name


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["NOTHING", "DIR"], 3, "there is no export in"),
        (["ARCHIVE", "DIR", "--partitions", "77"], 3, "holds no partition 77"),
        (["ARCHIVE", "DIR", "--partitions", "x"], 2, "is no partition"),
        (["ARCHIVE"], 2, "DIRECTORY"),
    ],
)
def test_mistakes(
    archive: Path, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"ARCHIVE": str(archive), "NOTHING": str(tmp_path / "none"), "DIR": str(tmp_path / "restored")}
    assert run(["archive", "restore", *[places.get(word, word) for word in arguments]]) == code
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert not (tmp_path / "restored").exists()


def test_the_examples_of_the_help(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_examples(capsys, ["archive", "restore"], {"/data/export": archive, "/data": tmp_path})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["restored", "restored-0"]
