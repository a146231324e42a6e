"""Lines of many daemons as one story: times, lines without one, and files that grow, are replaced and are cut."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from waltzctl.shell import merged_log
from waltzctl.shell.merged_log import LogLine, Tail, dated, merged, stamp


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:00:01.500Z INFO     one", 1500),
        ("1970-01-01T01:00:01,500+01:00 INFO c: one", 1500),
        ("1970-01-01T00:00:01.500+0000 one", 1500),
        ("waltzd storage is ready: listen=", None),
        ("  1970-01-01T00:00:01.500Z", None),
        ("1970-02-31T00:00:01.500Z", None),
        ("", None),
    ],
)
def test_when_a_line_was_written(text: str, at: int | None) -> None:
    assert stamp(text) == at


def line(second: int, text: str) -> str:
    return f"1970-01-01T00:00:{second:02d}.000Z {text}"


def test_a_line_without_a_time_belongs_to_the_one_before_it() -> None:
    texts = ["ready", line(3, "a"), "Traceback", line(2, "the clock was set back"), line(5, "b")]
    assert [one.time_ms for one in dated("x", texts, otherwise=9)] == [3000, 3000, 3000, 3000, 5000]
    assert [one.time_ms for one in dated("x", ["starts", "ends"], otherwise=9)] == [9, 9]


def test_stories_are_merged_by_time_and_keep_their_own_order() -> None:
    one = dated("one", [line(1, "a"), "b", line(4, "c")], otherwise=0)
    two = dated("two", [line(1, "d"), line(3, "e")], otherwise=0)
    assert "".join(found.text[-1] for found in merged([one, two])) == "abdec"


def texts(lines: list[LogLine]) -> list[str]:
    return [one.text for one in lines]


def test_the_newest_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against reading all of it, with blocks of every small size."""
    path = tmp_path / "log"
    chance = random.Random(7)
    content = "".join(f"{number}{'x' * chance.randrange(9)}\n" for number in range(40))
    for end in ("", "half a li"):
        path.write_text(content + end)
        for block in (1, 2, 7, 1000):
            monkeypatch.setattr(merged_log, "BLOCK_BYTES", block)
            for count in (0, 1, 5, 39, 40, 41):
                tail = Tail("x", path)
                assert texts(tail.last(count)) == content.splitlines()[40 - min(40, count) :]
                assert texts(tail.new()) == []
                tail.close()


def test_what_grows_is_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail("x", path)
    assert texts(tail.last(5)) == texts(tail.new()) == []
    path.write_text("one\ntw")
    assert texts(tail.new()) == ["one"]
    with path.open("a") as file:
        file.write("o\r\nthree")
    assert texts(tail.new()) == ["two"]

    path.rename(tmp_path / "log.old")
    path.write_text("four\n")
    with (tmp_path / "log.old").open("a") as file:
        file.write("!\n")
    assert texts(tail.new()) == ["three!"], "the old file first"
    assert texts(tail.new()) == ["four"]

    path.write_text("5\n")
    assert texts(tail.new()) == ["5"], "it was cut"
    path.unlink()
    assert texts(tail.new()) == []
    path.write_bytes(b"\xff\n")
    assert texts(tail.new()) == ["\ufffd"]
    tail.close()


def test_a_line_without_an_end_takes_no_memory_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_log, "LOOK_BYTES_MAX", 4)
    path = tmp_path / "log"
    path.write_text("123456789")
    tail = Tail("x", path)
    assert [texts(tail.new()) for _ in range(4)] == [[], ["12345678"], [], []]
    tail.close()
