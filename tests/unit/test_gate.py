"""The gate of a release: it goes on where it was interrupted, and never passes with a check that did not run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import gate
from tests.gate import CHECKS, Check, first_seed, load, run

COMMIT, OTHER = "a" * 40, "b" * 40
SEEDS = ("-m", "tests.simulation.simulate", "--faults", "none", "--seeds")
CRASH = ("-m", "tests.simulation.crash", "--jobs", "1", "--workloads", "1")
UNIT = ("-m", "pytest", "-q", "tests/unit/waltzd/protocol/test_level.py")
QUICK = (
    Check("simulation", "many seeds", (*SEEDS, "{0}..{9}"), "two seeds", (*SEEDS, "{0}..{1}")),
    Check("crash-test", "one workload", CRASH, "one workload", CRASH),
    Check("tests", "a unit test", UNIT, "a unit test", UNIT),
)


def counting(tmp_path: Path) -> tuple[Check, Check]:
    """Two checks: one passes and counts its runs, one fails until a file is there."""
    count = f"import sys; open({str(tmp_path / 'runs')!r}, 'a').write(sys.argv[1]); print('fine')"
    wait = f"import os, sys; print('a', 'line', sep=chr(10)); sys.exit(not os.path.exists({str(tmp_path / 'there')!r}))"
    return (
        Check("one", "counts", ("-c", count, "x"), "counts a little", ("-c", count, "s")),
        Check("two", "needs a file", ("-c", wait), "needs it, too", ("-c", wait)),
    )


def test_it_goes_on_with_what_has_not_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks, folder, page = counting(tmp_path), tmp_path / "state", tmp_path / "page.md"
    assert run(COMMIT, folder, page, ["one", "two"], checks) == 1
    assert "| two | needs a file | full | **failed** |" in page.read_text()
    assert "```\na\nline\n```" in page.read_text()
    (tmp_path / "there").touch()
    assert run(COMMIT, folder, page, ["one", "two"], checks) == 0
    assert (tmp_path / "runs").read_text() == "x", "what has passed is not run again"
    assert f"Commit `{COMMIT}`. 2 of 2 checks passed in full, 0 more" in page.read_text()
    assert load(folder, OTHER) == {}, "another commit has passed nothing"
    assert run(OTHER, folder, page, ["two"], checks) == 1
    assert "| one | counts | | **not run** | | |" in page.read_text()
    assert (folder / "one.json").exists()


def test_a_short_form_never_counts_as_the_full_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks, folder, page = counting(tmp_path)[:1], tmp_path / "state", tmp_path / "page.md"
    assert run(COMMIT, folder, page, ["one"], checks, is_short=True) == 0
    assert "0 of 1 checks passed in full, 1 more only in the short form." in page.read_text()
    assert "| one | counts a little | short | passed |" in page.read_text()
    assert run(COMMIT, folder, page, [], checks) == 1, "nothing passed in full"
    assert run(COMMIT, folder, page, ["one"], checks) == 0
    assert "1 of 1 checks passed in full, 0 more" in page.read_text()
    (folder / "one-short.json").unlink()
    assert run(COMMIT, folder, page, ["one"], checks, is_short=True) == 0, "the full form counts"
    assert (tmp_path / "runs").read_text() == "sx"


@pytest.mark.slow
def test_the_short_gate_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    names = [check.name for check in QUICK]
    assert run(COMMIT, tmp_path / "state", page, names, QUICK, is_short=True) == 0, page.read_text()


def test_a_changed_checkout_has_no_gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gate, "git", lambda *words: " M waltzd/a.py" if words[0] == "status" else COMMIT)
    assert gate.main([]) == 2
    assert "Next: commit them" in capsys.readouterr().out


def test_its_own_page_is_no_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "release-0.1.md").touch()
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    asked: list[str] = []

    def ask(*words: str) -> str:
        asked.append(words[0])
        command = ["git", "-C", str(tmp_path), *words]
        return (
            COMMIT
            if words[0] == "rev-parse"
            else subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )

    monkeypatch.setattr(gate, "git", ask)
    monkeypatch.setattr(gate, "run", lambda *given, **named: 0)
    assert gate.main([]) == 0
    assert asked == ["status", "rev-parse"]
    (tmp_path / "other").touch()
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    assert gate.main([]) == 2


def test_checks_have_names_of_their_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) == 20


def test_seeds_are_those_of_the_commit_and_each_is_simulated_once() -> None:
    assert first_seed(COMMIT) != first_seed(OTHER)
    ranges = [check.arguments[-1] for check in CHECKS if check.name.startswith("simulation")]
    simulated: list[int] = []
    for text in ranges:
        first, last = (int(end.strip("{}")) for end in text.split(".."))
        simulated += range(first, last + 1)
    assert simulated == list(range(10_000))
