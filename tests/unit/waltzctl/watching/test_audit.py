"""`waltzctl audit`: which lines are shown, and what is said of a file."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from waltzctl.main import run
from waltzctl.show import watching
from waltzctl.show.forms import put
from waltzctl.watching.audit import Told, chosen, examined
from waltzd.daemon.audit import ChainedFile
from waltzd.errors import PathMissing
from waltzd.protocol.audit import AuditLine

URI = "waltz://00000000-0000-0000-0000-000000000007/role"
LINE = AuditLine(
    number=1, time_ms=1000, who=f"{URI}/operator/ann", peer="10.0.0.1:7", what="StorageAdmin/Fence", partitions="0-3",
    about="session=9",
)  # fmt: skip
LINES = [
    Told(daemon="s2", line=LINE),
    Told(daemon="s1", line=LINE),
    Told(daemon="s1", line=replace(LINE, number=2, time_ms=900, who=f"{URI}/client/eve", code="W2024", times=19)),
    Told(daemon="s1", line=replace(LINE, number=3, time_ms=100, who="anonymous")),
]


def numbers(**wanted: object) -> list[tuple[str, int]]:
    asked = {"who": None, "since_ms": 0, "is_refused": False, **wanted}
    return [(one.daemon, one.line.number) for one in chosen(LINES, **asked)]  # type: ignore[arg-type]


def test_lines_in_the_order_of_time() -> None:
    assert numbers() == [("s1", 3), ("s1", 2), ("s1", 1), ("s2", 1)]
    assert numbers(since_ms=900) == [("s1", 2), ("s1", 1), ("s2", 1)]
    assert numbers(is_refused=True) == [("s1", 2)]


@pytest.mark.parametrize(
    ("who", "found"), [("ann", 2), ("a*", 3), ("eve", 1), ("an", 0), (f"{URI}/client/eve", 1), ("anonymous", 1)]
)
def test_a_name_is_that_of_the_certificate(who: str, found: int) -> None:
    assert len(numbers(who=who)) == found


def test_people_and_programs_are_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    page = watching.audit(LINES, {"s2": "b" * 64, "s1": ""})
    put(page, "table")
    shown = capsys.readouterr().out
    assert "client/eve" in shown
    assert "W2024" in shown
    put(page, "json")
    told = json.loads(capsys.readouterr().out)
    assert told["heads"] == {"s1": "", "s2": "b" * 64}
    assert told["audit"][2]["who"] == f"{URI}/client/eve"
    assert (told["audit"][2]["result"], told["audit"][2]["times"]) == ("refused", 19)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three files, of twelve lines."""
    chained = ChainedFile(str(tmp_path / "audit.log"), bytes_max=1200, files_max=9)
    for number in range(12):
        chained.append([replace(LINE, number=number)])
    chained.close()
    assert len(os.listdir(tmp_path)) > 2
    return tmp_path / "audit.log"


def said(file: Path, *more: str) -> int:
    return run(["audit", "verify", str(file), *more])


def test_a_file_that_nobody_touched_is_whole_with_the_older_ones(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(file) == 0
    told = capsys.readouterr().out
    assert "The chain holds: 12 lines" in told
    assert "the first of all" in told
    head = examined(file, None).chain.head
    assert said(file, "--head", head, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["head_is_known"] is True
    (file.parent / "audit.log.2").unlink()
    assert "older ones are not there" in (said(file), capsys.readouterr().out)[1]


def test_a_line_that_was_changed_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = file.parent / "audit.log.1"
    older.write_text(older.read_text().replace("ann", "bob", 1))
    assert said(file) == 8
    told = capsys.readouterr().out
    assert "The chain does not hold" in told
    assert "was changed" in " ".join(told.split())
    assert said(file, "-o", "json") == 8
    assert json.loads(capsys.readouterr().out)["findings"][0]["line"] == 1


def test_the_line_that_is_being_written_is_not_judged(file: Path) -> None:
    file.write_text(file.read_text() + '{"number":')
    assert examined(file, None).is_well
    older = file.parent / "audit.log.1"
    older.write_text(older.read_text() + '{"number":')
    assert not examined(file, None).is_well


def test_lines_that_were_cut_off_are_noticed_by_a_head_told_before(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = examined(file, None).chain.head
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert said(file) == 0, "a chain alone does not show it"
    assert said(file, "--head", head) == 8
    assert "cut off" in capsys.readouterr().out


def test_mistakes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(file, "--head", "soon") == 2
    with pytest.raises(PathMissing):
        examined(tmp_path / "nothing.log", None)
    assert said(tmp_path / "no" / "where.log") == 2
    assert "Traceback" not in capsys.readouterr().err
