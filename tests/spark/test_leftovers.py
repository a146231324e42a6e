"""What runs that were killed left is removed by the next one, and what a run that is at work has is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waltz_spark.engine.session import FOLDER_PREFIX, clear_logs, clear_up, scratch

WORKING = """
import sys, tempfile
from waltz_spark.engine.session import scratch
tempfile.tempdir = sys.argv[1]
with scratch() as place:
    (place / "half").write_text("of something")
    print(place, flush=True)
    sys.stdin.read()
"""


@contextmanager
def at_work(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run, as a process of its own, in the middle of something."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKING, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not what others have on this machine."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_what_a_killed_run_left_goes_and_what_another_one_has_stays(temporary: Path) -> None:
    with at_work(temporary) as (killed, left), at_work(temporary) as (_, kept):
        clear_up()
        assert [(left / "half").exists(), (kept / "half").exists()] == [True, True]
        killed.kill()
        killed.wait()
        assert (left / "half").exists(), "nobody was there to remove it"
        clear_up()
        assert [left.exists(), (kept / "half").exists()] == [False, True]


def test_a_run_that_ends_removes_its_own(temporary: Path) -> None:
    with scratch() as place:
        (place / "inner").mkdir()
        clear_up()
        assert (place / "inner").is_dir()
    assert list(temporary.iterdir()) == []


def test_a_run_whose_directory_was_taken_away_before_it_was_locked_makes_another(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody clears up just between the two steps."""
    made: list[str] = []

    def make(prefix: str) -> str:
        made.append(str(temporary / f"{prefix}{len(made)}"))
        os.mkdir(made[-1])
        if len(made) == 1:
            clear_up()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with scratch() as place:
        assert (str(place), place.is_dir()) == (made[1], True)


def test_only_directories_of_ours_are_touched(temporary: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (temporary / f"{FOLDER_PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{FOLDER_PREFIX}file").touch()
    (temporary / "other").mkdir()
    clear_up()
    assert sorted(path.name for path in temporary.iterdir()) == ["other", f"{FOLDER_PREFIX}file", f"{FOLDER_PREFIX}link"]
    assert (elsewhere / "file").exists()


def test_the_newest_logs_stay(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"2026-01-0{number}-x.log").touch()
    clear_logs(tmp_path, kept=3)
    assert sorted(path.name[9] for path in tmp_path.glob("*.log")) == ["5", "6", "7"]
