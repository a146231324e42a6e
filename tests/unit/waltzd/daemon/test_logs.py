"""The lines that a daemon keeps: those of before a restart are among them, and the file that has them stays small."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from waltzd.daemon import logs
from waltzd.daemon.logs import Ring


def told(ring: Ring, *texts: str) -> None:
    for text in texts:
        ring.handle(logging.LogRecord("waltz", logging.ERROR, "here", 1, text, (), None))
    ring.flush()


def test_lines_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    first = Ring()
    told(first, "said before there was a place")
    first.keep(str(path))
    told(first, "W3003 damaged")
    path.write_text(path.read_text() + '{"time_ms": 1, "level"\n[]\n')  # a crash in the middle of a line
    second = Ring()
    told(second, "it starts")
    second.keep(str(path))
    told(second, "it goes on")
    found = second.after(0).events
    assert [event.text for event in found] == [
        "said before there was a place", "W3003 damaged", "it starts", "it goes on",
    ]  # fmt: skip
    assert [event.number for event in found] == [1, 2, 3, 4]
    assert found[1].code == "W3003"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT_BYTES_MAX", 2000)
    monkeypatch.setattr(logs, "RECENT_MAX", 10)
    ring = Ring()
    ring.keep(str(tmp_path / "events.log"))
    for number in range(200):
        told(ring, f"line {number}")
    assert (tmp_path / "events.log").stat().st_size <= 2100
    assert "line 199" in (tmp_path / "events.log").read_text()


def test_a_place_where_nothing_can_be_written_keeps_nobody_from_anything(tmp_path: Path) -> None:
    ring = Ring()
    ring.keep(str(tmp_path / "nowhere" / "events.log"))
    told(ring, "all the same")
    assert [event.text for event in ring.after(0).events] == ["all the same"]


def test_what_a_caller_wrote_makes_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Every sign that somebody takes for the end of a line, and those that hide what stands before them."""
    before = logging.getLogger().handlers[:]
    try:
        logs.configure("text", "info")
        logging.getLogger("waltz").info("ann at 127.0.0.1: %s: done", "one\r\n\x0b\x0c\x1c\x85\u2028\u2029\x1b[2K\x00 two")
        try:
            raise ValueError("a mistake of ours")
        except ValueError:
            logging.getLogger("waltz").exception("it failed")
    finally:
        logging.basicConfig(handlers=before, force=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(r"ann at 127.0.0.1: one\r\n\x0b\x0c\x1c\x85\u2028\u2029\x1b[2K\x00 two: done")
    assert said[1].endswith("it failed")
    assert said[2].startswith("Traceback")


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(ssl.SSLError("bad record mac"), False), (ConnectionResetError(), False), (KeyError("a mistake of ours"), True)],
)
def test_a_connection_that_broke_is_no_traceback_of_the_loop(error: Exception, is_logged: bool) -> None:
    record = logging.LogRecord(
        "asyncio", logging.ERROR, "", 0, "Fatal error on SSL transport", (), (type(error), error, None)
    )
    assert logs._Strangers().filter(record) is is_logged
