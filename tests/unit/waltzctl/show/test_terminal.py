"""Tables on 80 columns: what is copied from them stays in one piece as long as anything else can give way."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from waltzctl.shell.change import history
from waltzctl.show.forms import put
from waltzctl.show.terminal import console, table, widths
from waltzd.cluster.documents import HistoryEntry

NAMES = ("storage", "admin address", "group", "replicas", "free", "answered", "state")
FULL = ("storage-1", "127.0.0.1:28599", "storage-1", "4", "123.4 GB", "12 ms", "up, disk full, offline")
SLOW = ("storage-2", "127.0.0.1:28601", "storage-2", "4", "123.4 GB", "1,234 ms!", "up")
RIGHT = ("replicas", "free", "answered")


def test_what_fits_is_left_to_itself() -> None:
    assert list(widths(("a", "b"), [("one two", "three")], (), 12)) == [None, None]


def test_words_stay_whole_and_the_rest_goes_to_whoever_lacks_most() -> None:
    assert list(widths(("a", "b"), [("one two", "three four five")], (), 16)) == [4, 12]
    assert list(widths(("a", "b"), [("one two", "three four five")], ("a",), 16)) == [7, 9]
    assert list(widths(("a", "b"), [("x" * 30, "word")], (), 12)) == [8, 4]
    assert list(widths(("a", "b"), [("", "")], (), 0)) == [1, 1]


def test_in_a_pipe_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    table(console(), NAMES, [FULL, SLOW], right=RIGHT)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 4, "names, a rule, and two rows"


def test_addresses_stay_whole_when_a_storage_is_ill() -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    table(screen, NAMES, [FULL, SLOW], right=RIGHT)
    assert isinstance(screen.file, io.StringIO)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())
    for text in ("127.0.0.1:28599", "127.0.0.1:28601", "123.4 GB", "1,234 ms!", "up, disk"):
        assert text in shown
    assert max(map(len, shown.splitlines())) == 80


def test_the_moments_of_the_history_stay_whole_and_are_those_of_other_pages(capsys: pytest.CaptureFixture[str]) -> None:
    entry = HistoryEntry(
        began="2026-11-22T11:55:48+00:00", ended=None, who="root@somehost", verb="storage availability",
        subject="storage-1", reason="because of this and that", steps=(), outcome="done",
    )  # fmt: skip
    put(history([(1, entry)]), "table")
    shown = capsys.readouterr().out
    for word in ("2026-11-22T11:55:48Z", "root@somehost", "availability", "storage-1", "because"):
        assert word in shown.split()
