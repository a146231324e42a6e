"""The audit log in its file: its chain holds over restarts, torn lines, full disks and rotation; no daemon stops for it."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from waltzd.daemon import audit
from waltzd.daemon.audit import AuditLog, ChainedFile
from waltzd.errors.operations import BadConfig
from waltzd.protocol.audit import START, AuditRecord

ANN = AuditRecord(
    who="waltz://k/role/operator/ann", peer="10.0.0.1:7", what="StorageAdmin/Fence", partitions="0", about="session=9"
)
EVE = AuditRecord(who="waltz://k/role/client/eve", peer="10.0.0.9:9", what="StorageAdmin/Fence", code="W2024")
APP = AuditRecord(who="waltz://k/role/client/app", peer="10.0.0.2:2", what="Log/Mount", partitions="3")


PAGE = Path(__file__).parents[4] / "docs/security.md"
CHECK = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "hashlib" in code)
"""The lines of Python with which an operator checks the chain."""


def line(number: int) -> tuple[AuditRecord, int]:
    return AuditRecord(who="ann", peer="", what="x"), number


def chained(path: Path, *, bytes_max: int = 1 << 20, files_max: int = 4) -> ChainedFile:
    return ChainedFile(str(path), bytes_max=bytes_max, files_max=files_max)


def check(*paths: Path) -> tuple[bool, str]:
    """Run what the page shows; return whether the chain holds, and the last line that was printed."""
    content = b"".join(path.read_bytes() for path in paths)
    done = subprocess.run([sys.executable, "-c", CHECK], input=content, capture_output=True, check=False)
    return done.returncode == 0, (done.stdout + done.stderr).decode().splitlines()[-1]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@contextmanager
def running(path: Path, **bounds: int) -> Iterator[AuditLog]:
    log = AuditLog(chained(path, **bounds))
    yield log
    log.close()
    assert log._file is not None
    log._file.close()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_chain_goes_on_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    for number in range(3):
        file = chained(path)
        file.open()
        file.append([line(2 * number), line(2 * number + 1)])
        file.close()
    assert check(path) == (True, f"the head is {file.head}")
    assert [one["time_ms"] for one in lines(path)] == [0, 1, 2, 3, 4, 5]
    assert lines(path)[0]["before"] == START
    assert path.stat().st_mode & 0o777 == 0o600


def test_lines_that_are_changed_taken_out_put_in_or_exchanged_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    chained(path).append([line(number) for number in range(6)])
    assert check(path)[0]
    whole = path.read_text().splitlines(keepends=True)
    forged = [
        [whole[0], whole[1].replace("ann", "eve"), *whole[2:]],
        [whole[0], *whole[2:]],
        [whole[0], whole[0], *whole[1:]],
        [whole[0], whole[2], whole[1], *whole[3:]],
    ]
    for texts in forged:
        path.write_text("".join(texts))
        holds, said = check(path)
        assert not holds
        assert "does not follow the line in front of it" in said


@pytest.mark.parametrize("torn", [b"{", b'{"number":1', b"\x00\xff" * 30])
def test_what_a_crash_left_of_a_line_is_cut_off_and_said(
    tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.log"
    file = chained(path)
    file.append([line(1)])
    file.close()
    path.write_bytes(path.read_bytes() + torn)
    file.append([line(2)])
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert f"{len(torn)} bytes" in caplog.text
    assert check(path)[0]
    assert len(lines(path)) == 2


def test_a_file_that_is_none_of_ours_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"x" * (audit.TORN_BYTES_MAX + 1))
    chained(path).append([line(1)])
    assert path.read_bytes().startswith(b"x" * (audit.TORN_BYTES_MAX + 1) + b"\n{")


def test_files_are_bounded_in_size_and_number_and_the_chain_runs_through_them(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    file = chained(path, bytes_max=2000, files_max=4)
    for number in range(100):
        file.append([line(number)])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["audit.log", "audit.log.1", "audit.log.2", "audit.log.3"]
    assert all(one.stat().st_size < 2500 for one in tmp_path.iterdir())
    names = ["audit.log.3", "audit.log.2", "audit.log.1", "audit.log"]
    assert check(*(tmp_path / name for name in names)) == (True, f"the head is {file.head}")
    assert lines(path)[-1]["time_ms"] == 99
    assert not check(*(tmp_path / name for name in reversed(names)))[0], "files in another order"


def test_right_behind_a_rotation_a_restart_goes_on_from_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    file = chained(path)
    file.append([line(1)])
    file.close()
    os.replace(path, tmp_path / "audit.log.1")
    again = chained(path)
    again.open()
    again.append([line(2)])
    assert check(tmp_path / "audit.log.1", path)[0]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = AuditLog(chained(tmp_path / "audit.log"))
    with pytest.raises(BadConfig, match="audit log cannot be written"):
        AuditLog(chained(tmp_path / "audit.log"))
    first.close()
    assert first._file is not None
    first._file.close()


@pytest.mark.parametrize("place", ["nowhere/audit.log", "."])
def test_a_place_where_it_can_never_be_is_a_mistake_in_the_configuration(tmp_path: Path, place: str) -> None:
    with pytest.raises(BadConfig, match="audit log cannot be written"):
        AuditLog(chained(tmp_path / place))


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_all_of_the_lines_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "audit.log"
    file = chained(path)
    file.append([line(1)])
    before = path.read_bytes()
    real = getattr(os, call)

    def full(fd: int, *content: Any) -> int:
        if content:
            os.pwrite(fd, bytes(content[0])[:7], os.fstat(fd).st_size)  # a piece still found room
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="full"):
        file.append([line(2), line(3)])
    monkeypatch.setattr(os, call, real)
    assert path.read_bytes() == before
    file.append([line(2), line(3)])
    assert check(path)[0]
    assert [one["time_ms"] for one in lines(path)] == [1, 2, 3]


def test_a_full_disk_stops_nobody_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.log"
    monkeypatch.setattr(audit, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(audit, "WAITING_MAX", 5)
    real = ChainedFile.append
    with running(path) as log:
        log.flush()
        is_full = True

        def append(file: ChainedFile, lines: list[tuple[AuditRecord, int]]) -> None:
            if is_full:
                raise OSError(errno.ENOSPC, "full")
            real(file, lines)

        monkeypatch.setattr(ChainedFile, "append", append)
        for _ in range(20):
            log.note(ANN)
        monkeypatch.setattr(audit, "FLUSH_SECONDS", 0.1)
        log.flush()
        monkeypatch.setattr(audit, "FLUSH_SECONDS", 30.0)
        is_full = False
        log.flush()
    complaints = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(complaints) == 1
    assert "goes on" in complaints[0]
    assert check(path)[0]
    assert [one["times"] for one in lines(path) if one["what"] == "audit/lost"] == [15], "the file says how many it has not"


def test_a_disk_that_is_full_at_the_start_keeps_no_daemon_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: ChainedFile) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(ChainedFile, "open", full)
    monkeypatch.setattr(audit, "FLUSH_SECONDS", 0.05)
    with running(tmp_path / "audit.log") as log:
        log.note(ANN)
    assert "W" in caplog.text
    assert "goes on" in caplog.text


# -- what is noted -----------------------------------------------------------------------------------------------------


def test_the_log_says_when_the_daemon_began_and_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "audit.log"
    for deed in (ANN, APP):
        with running(path) as log:
            log.note(deed)
    whats = [one["what"] for one in lines(path)]
    assert whats == ["audit/begin", ANN.what, "audit/end", "audit/begin", APP.what, "audit/end"]
    assert caplog.records[-1].getMessage().endswith(check(path)[1].rpartition(" ")[2]), "the head at the end"


def test_refusals_without_end_are_two_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "audit.log"
    caplog.set_level("DEBUG")
    with running(path) as log:
        for _ in range(1000):
            log.note(EVE)
    refused = [one["times"] for one in lines(path) if one["code"] == "W2024"]
    assert refused == [1, 999]
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 2
    assert caplog.records[-1].name == "waltz.audit"


def test_what_is_daily_work_is_no_event(caplog: pytest.LogCaptureFixture) -> None:
    """Events are the lines from info on."""
    caplog.set_level("DEBUG")
    log = AuditLog(None)
    for deed in (APP, AuditRecord(who="x", peer="y", what="Replica/Open", code="W2001"), ANN, EVE):
        log.note(deed)
    assert [one.levelname for one in caplog.records[1:]] == ["DEBUG", "DEBUG", "INFO", "WARNING"]
    assert "ann at 10.0.0.1:7: StorageAdmin/Fence partition 0 session=9: done" in caplog.text


def test_what_applications_do_without_end_pushes_no_line_of_a_person_out(tmp_path: Path) -> None:
    path, traffic = tmp_path / "audit.log", tmp_path / "audit-traffic.log"
    bounds = {"bytes_max": 4000, "files_max": 2}
    log = AuditLog(chained(path, **bounds), chained(traffic, **bounds))
    reading = AuditRecord(who=ANN.who, peer=ANN.peer, what="Log/Fetch", partitions="0")
    log.note(ANN)
    log.note(EVE)
    log.note(reading)
    for _ in range(20):
        for _ in range(50):
            log.note(APP)
        log.flush()
    log.close()
    told = lines(path)
    assert [one["what"] for one in told] == ["audit/begin", ANN.what, EVE.what, "Log/Fetch", "audit/end"]
    assert told[0]["before"] == START
    assert check(path)[0]
    assert not (tmp_path / "audit.log.1").exists()
    assert check(tmp_path / "audit-traffic.log.1", traffic)[0]
    assert {one["what"] for one in lines(traffic)} == {APP.what}


def test_the_second_file_stands_beside_the_first() -> None:
    assert audit._traffic_beside("/var/log/waltz/audit.log") == "/var/log/waltz/audit-traffic.log"
    assert audit._traffic_beside("a/trail") == "a/trail-traffic"


def test_a_clock_that_jumps_back_hides_no_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, steady, path = 1_800_000_000.0, 50.0, tmp_path / "audit.log"
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * now))
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(1e9 * steady))
    with running(path) as log:
        log.note(EVE)
        log.note(EVE)
        now, steady = now - 6 * 3600, steady + 61
        log.note(EVE)
        log.flush()
        found = [one for one in lines(path) if one["code"] is not None]
    assert [(one["times"], one["time_ms"] // 1000) for one in found] == [(1, 1_800_000_000), (1, int(now)), (1, int(now))]
