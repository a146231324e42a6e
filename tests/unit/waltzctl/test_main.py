"""What people write is refused where it is typed when it cannot be shown, and shown so that it moves no cursor."""

from __future__ import annotations

import getpass
import json
import unicodedata
from dataclasses import replace

import pytest

from tests.unit.snapshots import NOW_MS, partition, storage, well
from waltzctl.health import events
from waltzctl.main import run
from waltzctl.placement.creation import storage_of
from waltzctl.shell import change
from waltzctl.shell.change import history
from waltzctl.shell.merged_log import LogLine
from waltzctl.show.cluster import partitions, storages
from waltzctl.show.forms import Column, Columns, Listing, put
from waltzctl.show.terminal import console, is_line, printable
from waltzd.cluster.documents import HistoryEntry
from waltzd.errors import BadArgument, CannotConnect

NASTY = "\x1b]0;PWNED\a\x1b[31m\x1b[2J\r\x08\x9b\u202e"
ENTRY = HistoryEntry(
    began="2026-01-31T12:00:00+00:00", ended=None, who=NASTY, verb="storage set", subject=NASTY, reason=NASTY,
    steps=(NASTY,), outcome=f"W2025 {NASTY}",
)  # fmt: skip


def check(text: str) -> None:
    """Nothing in it does something to a terminal."""
    assert text
    strange = {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs") and one not in "\n\t"}
    assert strange == set(), text


def test_what_can_be_shown_stays_as_it_is() -> None:
    for text in ("", "new disks", "neue Platten für Zürich", "新しい", "a\u00a0b"):
        assert printable(text) == text
        assert is_line(text)
    assert printable("two\nlines\tand more") == "two\nlines\tand more"
    for text in ("two\nlines", "a\tb", "\x1b[31m", "\udcff", "\u2028", NASTY):
        assert not is_line(text)
    check(printable(NASTY + "\udcff"))


def test_history_and_lists_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    put(history([(1, ENTRY)]), "table")
    rows = [{"storage": NASTY, "trouble": NASTY}]
    columns: Columns[dict[str, str]] = (Column("storage"), Column("trouble"))
    for form in ("table", "wide", "json", "yaml", "csv", "name"):
        put(Listing(kind="storages", columns=columns, rows=rows, nothing=""), form)
    line = LogLine(time_ms=NOW_MS, who=NASTY, kind="operator", level="info", text=f"a {NASTY} b", code=None)
    put(events.newest_lines([line]), "table")
    events.print_silent({"s1": CannotConnect(NASTY)})
    said = capsys.readouterr()
    check(said.out)
    check(said.err)
    assert "\\x1b[31m" in said.out, "and it is not hidden"


def test_a_picture_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    found = well(storages=tuple(storage(name, group=NASTY) for name in ("s1", "s2", "s3")))
    said = partition(0).reported
    assert said is not None
    waiting = partition(0, reported=replace(said, waiting=NASTY))
    put(partitions(replace(found, partitions=(waiting, *found.partitions[1:]))), "wide")
    put(partitions(found), "json")
    put(storages(found), "table")
    check(capsys.readouterr().out)


def test_a_group_that_was_written_down_before(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"group {NASTY}", style="red", soft_wrap=True)
    check(capsys.readouterr().out)


def test_who_did_it_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person may choose what `LOGNAME` says."""
    monkeypatch.setenv("LOGNAME", f"ada{NASTY}\udcff")
    assert getpass.getuser() == f"ada{NASTY}\udcff"
    with_entry = json.dumps(change.current_user(), ensure_ascii=False)
    check(with_entry)
    assert with_entry.encode().startswith(b'"unverified: ada\\\\x1b')


# -- at the door -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["storage", "add", f"{name}=127.0.0.1:1,127.0.0.1:2", *more]
        for name in ("a/b", "..", "x y", "", "ÄÖ", "\x1b[31m", "x" * 65)
        for more in ([], ["--dry-run"])
    ]
    + [
        ["storage", "remove", "storage-1", "--replacement", f"{name}=127.0.0.1:1,127.0.0.1:2", "--yes"]
        for name in ("a/b", "..", "\x1b")
    ]
    + [
        [*words, f"s4=127.0.0.1:1,127.0.0.1:2,{group}"]
        for words in (["storage", "add"], ["storage", "remove", "storage-1", "--replacement"])
        for group in ("\x1b[31m", "x" * 65, " a", "a\nb")
    ]
    + [
        ["storage", "set", "storage-1", "--group", group, "--yes"]
        for group in ("", "\x1b[31m", "x" * 100_000, "a\tb", "\udcff")
    ]
    + [["storage", "set", "storage-1", "--listen", "\x1b[31m:1", "--yes"]]
    + [
        ["storage", "set", "storage-1", "--group", "a", "--yes", "--reason", reason]
        for reason in ("\x1b[31m", "a\nb", "\udcff")
    ]
    + [
        [
            "create-cluster",
            "--name",
            name,
            "--partitions",
            "1",
            "--replicas",
            "1",
            "--storage",
            "s1=127.0.0.1:1,127.0.0.1:2",
        ]
        for name in ("x y", "\x1b[31m", "")
    ],
    ids=lambda words: ascii(" ".join(words))[:60],
)
def test_it_is_refused_before_anything_is_asked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--coordinator", "127.0.0.1:1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("W1001 ")
    check(said.err)


def test_groups_have_the_words_that_people_use() -> None:
    for group in ("rack-1", "Zürich 2", "eu-central-1/a", "x" * 64):
        assert storage_of(f"s1=h:1,h:2,{group}").group == group
    with pytest.raises(BadArgument, match="the group has no name"):
        storage_of("s1=h:1,h:2,")
