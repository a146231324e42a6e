"""The gate of a release: it goes on where it was interrupted, and never passes with a check that did not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import gate
from tests.gate import CHECKS, Check, load, run, seeds

COMMIT, OTHER = "a" * 40, "b" * 40
SHORT = (
    Check("simulation", "two seeds", ("-m", "tests.simulation.simulate", "--seeds", "0..1", "--faults", "none")),
    Check("crash-test", "one workload", ("-m", "tests.simulation.crash", "--workloads", "1", "--jobs", "1")),
    Check("tests", "a unit test", ("-m", "pytest", "-q", "tests/unit/waltzd/protocol/test_level.py")),
)


def counting(tmp_path: Path) -> tuple[Check, Check]:
    """Two checks: one passes and counts its runs, one fails until a file is there."""
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x'); print('fine')"
    wait = f"import os, sys; print('a', 'line', sep=chr(10)); sys.exit(not os.path.exists({str(tmp_path / 'there')!r}))"
    return Check("one", "counts", ("-c", count)), Check("two", "needs a file", ("-c", wait))


def test_it_goes_on_with_what_has_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks, folder, page = counting(tmp_path), tmp_path / "state", tmp_path / "page.md"
    assert run(COMMIT, folder, page, ["one", "two"], checks) == 1
    assert "| two | needs a file | **failed** |" in page.read_text()
    assert "```\na\nline\n```" in page.read_text()
    (tmp_path / "there").touch()
    assert run(COMMIT, folder, page, ["one", "two"], checks) == 0
    assert (tmp_path / "runs").read_text() == "x", "what has passed is not run again"
    assert f"Commit `{COMMIT}`. 2 of 2 checks passed." in page.read_text()
    assert load(folder, OTHER) == {}, "another commit has passed nothing"
    assert run(OTHER, folder, page, ["two"], checks) == 1
    assert "| one | counts | **not run** |  |  |" in page.read_text()
    assert (folder / "one.json").exists()


@pytest.mark.slow
def test_the_short_gate_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run(COMMIT, tmp_path / "state", page, [check.name for check in SHORT], SHORT) == 0, page.read_text()


def test_a_changed_checkout_has_no_gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gate, "git", lambda *words: " M waltzd/a.py" if words[0] == "status" else COMMIT)
    assert gate.main([]) == 2
    assert "Next: commit them" in capsys.readouterr().out


def test_checks_have_names_of_their_own_and_seeds_are_those_of_the_commit() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) == 10
    first, last = seeds(COMMIT)
    assert last - first == 9_999
    assert seeds(OTHER) != (first, last)
