"""Processes that keep one view in one SQLite file together, and are killed while they do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from tests.unit.waltzd.sql.test_view import content, holds
from waltzd.sql import sqlite

ROOT = Path(__file__).parents[2]
SECONDS = 120


def applier(url: str, last: int, batch: int, die_at: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.process.applier", url, str(last), str(batch)]
    if die_at:
        command += ["--die-at", str(die_at)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = sqlite(str(tmp_path / "view.db"))
    yield engine
    engine.dispose()


def test_a_process_killed_in_front_of_any_statement_leaves_whole_transactions(engine: Engine) -> None:
    """Each process goes on where the one before it was killed, and lives a few statements longer."""
    last, killed = 3, 0
    for die_at in range(1, 60, 3):
        if finish(applier(str(engine.url), last, 2, die_at)) == 0:
            break
        killed += 1
        if {"rows", "total", "waltz_positions"} <= set(sa.inspect(engine).get_table_names()):
            ids, total, mark = content(engine)
            assert (ids, total) == (list(range(mark + 1)), mark + 1)
    assert killed >= 5
    assert holds(engine, last)


def test_two_processes_of_which_one_is_killed_again_and_again(engine: Engine) -> None:
    last = 400
    steady = applier(str(engine.url), last, 3)
    for round in range(4):
        victim = applier(str(engine.url), last, 2 + round)
        assert victim.stdout is not None
        victim.stdout.readline()  # it is about to apply
        victim.kill()
        assert finish(victim) in (0, -signal.SIGKILL)
    assert finish(steady) == 0
    assert finish(applier(str(engine.url), last, 7)) == 0
    assert holds(engine, last)
