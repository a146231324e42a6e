"""The audit log in its file: its chain holds over restarts, torn lines, full disks and rotation; no daemon stops for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from waltzd.daemon import audit
from waltzd.daemon.audit import AuditLog, ChainedFile
from waltzd.errors import BadConfig
from waltzd.protocol.audit import START, AuditLine, Break, Chain, Deed, decode

ANN = Deed(
    who="waltz://k/role/operator/ann", peer="10.0.0.1:7", what="StorageAdmin/Fence", partitions="0", about="session=9"
)
EVE = Deed(who="waltz://k/role/client/eve", peer="10.0.0.9:9", what="StorageAdmin/Fence", code="W2024")
APP = Deed(who="waltz://k/role/client/app", peer="10.0.0.2:2", what="Log/Mount", partitions="3")


def line(number: int) -> AuditLine:
    return AuditLine(number=number, time_ms=number, who="ann", peer="", what="x")


def chained(path: Path, *, bytes_max: int = 1 << 20, files_max: int = 4) -> ChainedFile:
    return ChainedFile(str(path), bytes_max=bytes_max, files_max=files_max)


def read(*paths: Path) -> tuple[Chain, list[Break]]:
    chain = Chain()
    breaks = [found for path in paths for found in chain.follow(path.name, path.read_text().splitlines())]
    return chain, breaks


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
        assert len(file.open()) == 2 * number
        file.append([line(2 * number), line(2 * number + 1)])
        file.close()
    chain, breaks = read(path)
    assert (breaks, chain.lines, chain.head) == ([], 6, file.head)
    assert path.stat().st_mode & 0o777 == 0o600


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
    chain, breaks = read(path)
    assert (breaks, chain.lines) == ([], 2)


def test_a_last_line_that_was_changed_is_kept_and_the_break_stays_visible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.log"
    file = chained(path)
    file.append([line(1), line(2)])
    file.close()
    path.write_text(path.read_text().replace('"number":2', '"number":7'))
    file.append([line(3)])
    assert "begins anew" in caplog.text
    chain, breaks = read(path)
    assert [found.line for found in breaks] == [2]
    assert chain.lines == 2


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
    chain, breaks = read(*(tmp_path / name for name in ("audit.log.3", "audit.log.2", "audit.log.1", "audit.log")))
    assert breaks == []
    assert chain.last is not None
    assert (chain.last.number, chain.head, chain.is_from_the_start) == (99, file.head, False)
    _, breaks = read(*(tmp_path / name for name in ("audit.log.2", "audit.log.3", "audit.log.1", "audit.log")))
    assert breaks, "files in another order"


def test_right_behind_a_rotation_a_restart_goes_on_from_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    file = chained(path)
    file.append([line(1)])
    file.close()
    os.replace(path, tmp_path / "audit.log.1")
    again = chained(path)
    assert [one.number for one in again.open()] == [1]
    again.append([line(2)])
    assert read(tmp_path / "audit.log.1", path)[1] == []


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
    assert read(path)[1] == []
    assert read(path)[0].lines == 3


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

        def append(file: ChainedFile, lines: list[AuditLine]) -> None:
            if is_full:
                raise OSError(errno.ENOSPC, "full")
            real(file, lines)

        monkeypatch.setattr(ChainedFile, "append", append)
        for _ in range(20):
            log.note(ANN)
        monkeypatch.setattr(audit, "FLUSH_SECONDS", 0.1)
        log.flush()
        assert len([one for one in log.lines().lines if one.what == ANN.what]) == 20, "memory has them"
        monkeypatch.setattr(audit, "FLUSH_SECONDS", 30.0)
        is_full = False
        log.flush()
    complaints = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(complaints) == 1
    assert "goes on" in complaints[0]
    chain, breaks = read(path)
    assert breaks == []
    assert chain.lost == 15, "and the file says how many it has not"


def test_a_disk_that_is_full_at_the_start_keeps_no_daemon_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: ChainedFile) -> list[AuditLine]:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(ChainedFile, "open", full)
    monkeypatch.setattr(audit, "FLUSH_SECONDS", 0.05)
    with running(tmp_path / "audit.log") as log:
        log.note(ANN)
    assert "W" in caplog.text
    assert "goes on" in caplog.text


# -- what is noted -----------------------------------------------------------------------------------------------------


def test_the_newest_lines_are_known_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with running(path) as log:
        log.note(ANN)
        log.note(APP)
    with running(path) as again:
        found = again.lines()
        assert [one.what for one in found.lines] == ["audit/begin", ANN.what, APP.what, "audit/end", "audit/begin"]
        assert [one.number for one in found.lines] == [1, 2, 3, 4, 5]
    chain, breaks = read(path)
    assert (breaks, chain.lines, chain.is_from_the_start) == ([], 6, True)
    assert again.head == chain.head
    assert found.head in {START, *chain.heads}


def test_refusals_without_end_are_two_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "audit.log"
    caplog.set_level("DEBUG")
    with running(path) as log:
        for _ in range(1000):
            log.note(EVE)
    refused = [one.times for one in log.lines().lines if one.code == "W2024"]
    assert refused == [1, 999]
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 2
    assert caplog.records[-1].name == "waltz.audit"


def test_what_applications_do_does_not_push_out_what_people_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "RECENT_MAX", 10)
    log = AuditLog(None)
    log.note(ANN)
    for _ in range(100):
        log.note(APP)
    found = [one.what for one in log.lines().lines]
    assert ANN.what in found
    assert found.count(APP.what) == 10
    assert log.head == ""


def test_what_is_daily_work_is_no_event(caplog: pytest.LogCaptureFixture) -> None:
    """Events are the lines from info on."""
    caplog.set_level("DEBUG")
    log = AuditLog(None)
    for deed in (APP, Deed(who="x", peer="y", what="Replica/Open", code="W2001"), ANN, EVE):
        log.note(deed)
    assert [one.levelname for one in caplog.records[1:]] == ["DEBUG", "DEBUG", "INFO", "WARNING"]
    assert "ann at 10.0.0.1:7: StorageAdmin/Fence partition 0 session=9: done" in caplog.text


def test_what_applications_do_without_end_pushes_no_line_of_a_person_out(tmp_path: Path) -> None:
    path, traffic = tmp_path / "audit.log", tmp_path / "audit-traffic.log"
    bounds = {"bytes_max": 4000, "files_max": 2}
    log = AuditLog(chained(path, **bounds), chained(traffic, **bounds))
    reading = Deed(who=ANN.who, peer=ANN.peer, what="Log/Fetch", partitions="0")
    log.note(ANN)
    log.note(EVE)
    log.note(reading)
    for _ in range(20):
        for _ in range(50):
            log.note(APP)
        log.flush()
    log.close()
    chain, breaks = read(path)
    assert (breaks, chain.is_from_the_start, chain.head) == ([], True, log.head)
    told = [decode(text)[0] for text in path.read_text().splitlines()]
    assert [one.what for one in told] == ["audit/begin", ANN.what, EVE.what, "Log/Fetch", "audit/end"]
    assert not (tmp_path / "audit.log.1").exists()
    chain, breaks = read(tmp_path / "audit-traffic.log.1", traffic)
    assert (breaks, chain.is_from_the_start) == ([], False)
    numbers = [one.number for one in log.lines().lines]
    assert numbers == sorted(set(numbers)), "one count for both"
    for file in (log._file, log._traffic):
        assert file is not None
        file.close()
    again = AuditLog(chained(path, **bounds), chained(traffic, **bounds))
    again.note(ANN)
    assert again.lines().lines[-1].number > max(numbers)
    again.close()


def test_the_second_file_stands_beside_the_first() -> None:
    assert audit._traffic_beside("/var/log/waltz/audit.log") == "/var/log/waltz/audit-traffic.log"
    assert audit._traffic_beside("a/trail") == "a/trail-traffic"
