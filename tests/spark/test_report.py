"""A report by Spark against one by counting, and what is refused before Spark is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from waltz_spark.analysis import render_report, report, report_chart
from waltz_spark.analysis.report import Measure, Part, Report
from waltz_spark.log.decode import record_batch
from waltz_spark.log.directory_origin import DirectoryOrigin

from tests.spark.batches import mixed_log
from tests.spark.exporting import export, storage_with
from tests.spark.telling import run_examples
from waltzctl.main import run
from waltzd.errors import ExportDamaged, PartitionDamaged
from waltzd.format.layout import HEADER_BYTES, FileHeader


@pytest.fixture(scope="module")
def source(original: Path) -> Path:
    return original / "storage0"


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its name is one that Spark would take for a pattern."""
    output = tmp_path_factory.mktemp("report") / "export [1]{a}"
    export(output, source)
    return output


@pytest.fixture(scope="module")
def counted(source: Path) -> dict[str, dict[str, list[int]]]:
    """The dumb twin: the sizes of the payloads, by what they are counted by."""
    found: dict[str, dict[str, list[int]]] = {key: {} for key in ("total", "partition", "header", "client", "day")}
    origin = DirectoryOrigin(storages=(str(source),), allows_uncommitted=True)
    for extent in origin.catalog().extents:
        created = FileHeader.decode(Path(extent.place).read_bytes()[:HEADER_BYTES], extent.place).created_ms
        day = datetime.fromtimestamp(created / 1000, UTC).strftime("%Y-%m-%d")
        for records in origin.read(extent, extent.span, batch_bytes=1 << 20):
            for row in record_batch(records, extent.partition).to_pylist():
                names = {
                    "total": "",
                    "partition": row["partition"],
                    "header": row["header"],
                    "client": row["client_id"],
                    "day": day,
                }
                for key, name in names.items():
                    found[key].setdefault(str(name), []).append(len(row["data"]))
    return found


def check(parts: list[Part], sizes: dict[str, list[int]]) -> None:
    assert {part.name for part in parts} <= set(sizes)
    for part in parts:
        there = sorted(sizes[part.name])
        measure = part.measure
        assert (measure.transactions, measure.bytes, measure.max) == (len(there), sum(there), there[-1])
        assert (measure.p50, measure.p99) == (there[-(-len(there) // 2) - 1], there[-(-len(there) * 99 // 100) - 1])


def check_all(found: Report, counted: dict[str, dict[str, list[int]]], *, top: int) -> None:
    check([Part(name="", first=0, last=0, measure=found.total)], counted["total"])
    check(list(found.partitions), counted["partition"])
    assert len(found.partitions) == len(counted["partition"])
    for parts, key, count in ((found.headers, "header", found.header_count), (found.clients, "client", found.client_count)):
        check(list(parts), counted[key])
        assert count == len(counted[key])
        largest = sorted((sum(sizes) for sizes in counted[key].values()), reverse=True)[:top]
        assert [part.measure.bytes for part in parts] == largest
    for part in found.partitions:
        assert (part.first, part.last) == (0, part.measure.transactions - 1)


def test_an_export_is_counted(spark: Any, archive: Path, counted: dict[str, dict[str, list[int]]]) -> None:
    found = report.gather(spark, report.archive_log(str(archive), None, None), top=3)
    check_all(found, counted, top=3)
    assert found.time_unit == "day"
    check(list(found.times), counted["day"])


def test_directories_are_counted(spark: Any, source: Path, counted: dict[str, dict[str, list[int]]]) -> None:
    log = report.origin_log(DirectoryOrigin(storages=(str(source),), allows_uncommitted=True), None)
    found = report.gather(spark, log, top=1000)
    check_all(found, counted, top=1000)
    check(list(found.times), counted["day"])


def test_some_partitions_of_an_export_without_days(
    spark: Any, source: Path, counted: dict[str, dict[str, list[int]]], tmp_path: Path
) -> None:
    export(tmp_path / "export", source, is_lossless=False)
    found = report.gather(spark, report.archive_log(str(tmp_path / "export"), (0, 4), None), top=10)
    assert [part.name for part in found.partitions] == ["0", "4"]
    check(list(found.partitions), counted["partition"])
    assert (found.time_unit, list(found.times)) == ("", [])


def test_hours_of_a_column(spark: Any, tmp_path: Path) -> None:
    """Payloads that do not decode are counted, without a time."""
    payloads = [
        b'{"at": "2026-01-02T03:59:59Z"}', b'{"at": "2026-01-02T04:00:00+01:00"}', b"?",
        b'{"at": "2026-01-02T04:00:00Z"}', b"{}",
    ]  # fmt: skip
    found = export(
        tmp_path / "export", storage_with(tmp_path / "s", {0: payloads}), is_lossless=False, decode="json:`at` timestamp"
    )
    assert dict(found.shape.schema)["at"] == "timestamp[us, tz=UTC]"
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    said = report.gather(spark, report.archive_log(str(tmp_path / "export"), None, "at"), top=10)
    assert said.time_unit == "hour"
    assert [(part.name, part.measure.transactions) for part in said.times] == [
        ("", 2), ("2026-01-02T03:00", 2), ("2026-01-02T04:00", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["export", "directory"])
def test_hours_and_locks_of_a_log_of_both_formats(spark: Any, tmp_path: Path, kind: str) -> None:
    """Against counting, one transaction after the other."""
    (tmp_path / "storage").mkdir()
    logs = [mixed_log(tmp_path / "storage" / str(number), 7 + number, partition=number) for number in (0, 1)]
    for log in logs:
        log.time += 3_600_000_000
        for _ in range(5):
            log.add(20, pool=6)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if kind == "export":
        export(tmp_path / "export", tmp_path / "storage", is_lossless=False)
        counting: report.Log = report.archive_log(str(tmp_path / "export"), None, None)
    else:
        origin = DirectoryOrigin(storages=(str(tmp_path / "storage"),), allows_uncommitted=True)
        counting = report.origin_log(origin, None)
    found = report.gather(spark, counting, top=4)
    rows = [row for log in logs for row in log.rows]
    hours = Counter("" if row["time"] is None else f"{row['time']:%Y-%m-%dT%H}:00" for row in rows)
    assert found.time_unit == "hour"
    assert [(part.name, part.measure.transactions) for part in found.times] == sorted(hours.items())
    used: dict[tuple[int, int], Counter[str]] = {}
    for row in rows:
        for lock in row["locks"] or ():
            used.setdefault((row["partition"], lock["lock"] % (1 << 64)), Counter())[lock["mode"]] += 1
    assert found.lock_count == len(used)
    most = sorted((modes["WRITE"] + modes["APPEND"] for modes in used.values()), reverse=True)[:4]
    assert [usage.writes + usage.appends for usage in found.locks] == most
    for usage in found.locks:
        modes = used[usage.partition, usage.lock]
        assert (usage.writes, usage.appends, usage.reads) == (modes["WRITE"], modes["APPEND"], modes["READ"])
        assert usage.clients > 1


def test_a_log_without_a_record(spark: Any, source: Path) -> None:
    log = report.origin_log(DirectoryOrigin(storages=(str(source),), allows_uncommitted=True), (3,))
    found = report.gather(spark, log, top=10)
    assert (found.total, list(found.partitions), list(found.times)) == (report.NOTHING, [], [])


def test_damage_is_told_as_what_it_is(spark: Any, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "storage"
    shutil.copytree(source, copy)
    path = copy / "1" / "0000000000000000000.seg"
    raw = bytearray(path.read_bytes())
    raw[3000] ^= 1
    path.write_bytes(raw)
    log = report.origin_log(DirectoryOrigin(storages=(str(copy),), allows_uncommitted=True), None)
    with pytest.raises(PartitionDamaged, match=r"bytes \d+ to \d+ are not the record of id \d+ of partition 1"):
        report.gather(spark, log, top=1)


# -- what is shown -----------------------------------------------------------------------------------------------------


def made_up(times: int) -> Report:
    def part(number: int, name: str = "") -> Part:
        measure = Measure(transactions=number + 1, bytes=10 * number**3, p50=number, p99=2 * number, max=3 * number)
        return Part(name=name or str(number), first=0, last=number, measure=measure)

    parts = [part(number) for number in range(60)]
    whole = sum((Counter(asdict(one.measure)) for one in parts), Counter[str]())
    total = Measure(transactions=whole["transactions"], bytes=whole["bytes"], p50=1, p99=2, max=3)
    return Report(
        source="made up", total=total, partitions=parts, headers=parts[:2], header_count=5, clients=parts[:1],
        client_count=1,
        times=[part(number, f"2026-01-{number:02}") for number in range(1, times)], time_unit="day" if times else "",
    )  # fmt: skip


def test_what_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    render_report.show(made_up(5), "table")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[0] == "1,830 transactions, 31.3 MB of payload, in 60 partitions: made up"
    assert [line.split()[0] for line in out.splitlines() if "%" in line][:3] == ["59", "58", "57"]
    assert "and 40 more partitions; -o json has all" in out
    assert "and 3 more headers; --top shows more" in out
    render_report.show(made_up(0), "table")
    assert "Nothing here says when" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
@pytest.mark.parametrize("times", [0, 30])
def test_a_picture(tmp_path: Path, name: str, begins: bytes, times: int) -> None:
    path = tmp_path / name
    report_chart.check(path)
    report_chart.draw(made_up(times), path)
    assert path.read_bytes().startswith(begins)
    assert path.stat().st_size > 5000


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    render_report.show(made_up(5), "json")
    found = json.loads(capsys.readouterr().out)
    assert len(found["partitions"]) == 60
    assert (found["header_count"], found["time_unit"], len(found["times"])) == (5, "day", 4)
    parts = made_up(5)
    assert found["total"] == asdict(parts.total)
    assert found["partitions"][1] == {"partition": 1, "first": parts.partitions[1].first, "last": parts.partitions[1].last,
                                      "share": round(parts.share(parts.partitions[1]), 4),
                                      **asdict(parts.partitions[1].measure)}  # fmt: skip
    assert found["headers"][0] == {"header": 0, **asdict(parts.headers[0].measure)}
    assert found["clients"][0] == {"client": 0, **asdict(parts.clients[0].measure)}
    assert found["times"][0] == {"time": "2026-01-01", **asdict(parts.times[0].measure)}
    render_report.show(made_up(5), "csv")
    assert capsys.readouterr().out.splitlines()[0] == "partition,first,last,share,transactions,bytes,p50,p99,max"
    render_report.show(made_up(5), "name")
    assert capsys.readouterr().out.split() == [str(number) for number in range(60)]


def test_a_file_that_is_missing_is_noticed_before_spark_is_started(archive: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    gone = sorted(copy.glob("*.parquet"))[3]
    gone.unlink()
    with pytest.raises(ExportDamaged, match=gone.name):
        report.archive_log(str(copy), None, None)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["NOTHING"], 3, "there is no export in"),
        (["ARCHIVE", "--source", "X"], 2, "ARCHIVE and --source name two logs"),
        (["ARCHIVE", "--directory", "X"], 2, "ARCHIVE and --directory name two logs"),
        (["ARCHIVE", "--tls-key", "X"], 2, "ARCHIVE and --tls-key name two logs"),
        (["ARCHIVE", "--allow-uncommitted"], 2, "--allow-uncommitted needs --source"),
        (["--source", "X", "--coordinator", "z:1"], 2, "--source and --coordinator name two logs"),
        (["--source", "NOTHING"], 2, "does not exist"),
        (["--source", "NOTHING", "--time-column", "at"], 2, "--time-column needs ARCHIVE"),
        (["ARCHIVE", "--time-column", "at"], 3, "there is no column at"),
        (["ARCHIVE", "--time-column", "data"], 3, "the column data of the export is binary, and no time"),
        (["ARCHIVE", "--partitions", "9"], 3, "holds no partition 9"),
        (["ARCHIVE", "--chart", "picture.bmp"], 2, "it has to end in .png"),
        (["ARCHIVE", "--chart", "no/where/picture.png"], 2, "there is no directory"),
        (["ARCHIVE", "--master", "here"], 2, "that is no master"),
        (["ARCHIVE", "--conf", "x"], 2, "it has to be spark.NAME=VALUE"),
        (["ARCHIVE", "--java-home", "NOTHING"], 2, "is no Java for Spark"),
        (["ARCHIVE", "--top", "0"], 2, "--top"),
    ],
)
def test_mistakes_are_found_before_spark_is_started(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: int, words: str,
) -> None:  # fmt: skip
    from waltz_spark.engine import session

    monkeypatch.setattr(session, "running", None)
    places = {"ARCHIVE": str(archive), "NOTHING": str(tmp_path / "none")}
    assert run(["analysis", "report", *[places.get(word, word) for word in arguments]]) == code
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def test_the_whole_command(archive: Path, tmp_path: Path, counted: dict[str, dict[str, list[int]]]) -> None:
    """In a process of its own, with a Spark of its own."""
    picture = tmp_path / "report.png"
    command = [sys.executable, "-m", "waltzctl", "analysis", "report", str(archive), "--chart", str(picture), "-o", "json",
               "--conf", "spark.sql.shuffle.partitions=1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ})
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["total"]["transactions"] == len(counted["total"][""])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_examples_of_the_help(
    spark: Any,
    archive: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the Spark of the tests: to start one takes as long as all the rest."""
    monkeypatch.setattr(report, "made_by", lambda _, log, top: report.gather(spark, log, top=top))
    tool = {"/data/export": archive, "/data": tmp_path, "/var/lib/waltz": source}
    shown = run_examples(capsys, ["analysis", "report"], tool)
    assert shown[0].out.startswith("605 transactions, 259.0 kB of payload, in 5 partitions: ")
    assert (tmp_path / "report.png").exists()
    assert [part["partition"] for part in json.loads(shown[-1].out)["partitions"]] == [0]
