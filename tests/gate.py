"""`./dev gate`: what a commit has to pass before it is released, one check after the other, and a page with the results.

It takes hours. When it is interrupted, the same command goes on with the first check that has no result for this commit.
A check that failed is run again; one that passed is not. With `--short` each check has a small form of some minutes, to see
that all of them work on this machine; a full form that passed counts as the short one, too, and never the other way. The
page says which form of each check ran, and which checks were not run. The exit code is 0 if all of them passed in the form
that was asked for."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.machine import this_machine
from tests.release.packages import ROOT, git, project_version

STATE = ROOT / "build" / "gate"
"""Folder with a result for each check that ended, and the output of each."""
PAGES = "docs/release-*.md"
"""Pages of results: a run writes one, and goes on although it has changed."""
TAIL_LINES = 5
_SIMULATE = ("-m", "tests.simulation.simulate", "--jobs", "2", "--seeds")
_PYTEST = ("-m", "pytest", "-q")


@dataclass(frozen=True)
class Form:
    what: str
    arguments: tuple[str, ...]
    variables: tuple[str, ...]


@dataclass(frozen=True)
class Check:
    """A command of this project's Python that ends with 0 if the commit passes.

    A number in braces stands for that one of the commit's 10,000 seeds."""

    name: str
    what: str
    """What the full form shows, for the page."""
    arguments: tuple[str, ...]
    short_what: str
    """What the short form shows."""
    short: tuple[str, ...]
    """Arguments of the short form."""
    variables: tuple[str, ...] = ()
    """Environment variables of the full form, as in NAME=value."""

    def form(self, *, is_short: bool) -> Form:
        return Form(self.short_what, self.short, ()) if is_short else Form(self.what, self.arguments, self.variables)


CHECKS = (
    Check(
        "tests",
        "all tests, also the long ones: mixed versions, release artefacts, tutorial",
        (*_PYTEST, "-n", "5", "--dist", "worksteal"),
        "unit tests that are not slow, and mixed versions with real wheels",
        (
            *_PYTEST,
            "-n",
            "2",
            "-m",
            "not long and not slow",
            "tests/unit",
            "tests/process/test_upgrade.py",
            "tests/process/test_version_before.py",
        ),
    ),
    Check(
        "mutants",
        "the simulation finds every deliberate bug",
        ("-m", "tests.simulation.mutants", "--jobs", "2"),
        "the simulation finds the deliberate bugs about levels and majorities",
        ("-m", "tests.simulation.mutants", "--jobs", "2", "--only", "minority", "--only", "version of a storage"),
    ),
    Check(
        "crash-test",
        "1,000 workloads, crashed before every operation of the disk",
        ("-m", "tests.simulation.crash", "--format", "1"),
        "20 workloads, crashed before every operation of the disk",
        ("-m", "tests.simulation.crash", "--format", "1", "--workloads", "20"),
    ),
    Check(
        "flips",
        "every flipped bit of a segment is found",
        (*_PYTEST, "tests/unit/waltzd/format/test_scan_batches.py"),
        "flipped bits of a small segment are found",
        (*_PYTEST, "tests/unit/waltzd/format/test_scan_batches.py"),
        ("WALTZ_FLIPS=1",),
    ),
    Check(
        "chaos",
        "30 minutes of faults on real processes",
        ("-m", "tests.chaos", "--minutes", "30"),
        "one minute of faults on real processes",
        ("-m", "tests.chaos", "--minutes", "1"),
    ),
    Check("kills", "200 kills", ("-m", "tests.chaos", "--kills", "200"), "5 kills", ("-m", "tests.chaos", "--kills", "5")),
    Check(
        "applications",
        "example applications for ten minutes",
        ("-m", "tests.applications", "--minutes", "10"),
        "example applications for one minute",
        ("-m", "tests.applications", "--minutes", "1"),
    ),
    Check(
        "groups",
        "16 members of consumer groups on real daemons for ten minutes",
        ("-m", "tests.group_race", "--real", "--members", "16", "--seconds", "600"),
        "6 members of consumer groups on real daemons for 30 seconds",
        ("-m", "tests.group_race", "--real", "--members", "6", "--seconds", "30"),
    ),
    Check(
        "decisions",
        "10,000 rounds in which 16 racers make the same decision while owners are killed",
        ("-m", "tests.decision_race", "--seed", "{0}"),
        "500 rounds in which 16 racers make the same decision while owners are killed",
        ("-m", "tests.decision_race", "--seed", "{0}", "--rounds", "500"),
    ),
    Check(
        "peers",
        "the benchmark beside other systems",
        ("-m", "tests.bench", "peers"),
        "the benchmark of Waltz beside the floor, one round",
        ("-m", "tests.bench", "peers", "--rounds", "1", "--seconds", "2", "--sizes", "512", "--peers", "waltz,floor"),
    ),
    *(
        Check(
            f"simulation-{part + 1}",
            f"part {part + 1} of 10,000 seeds that were not run before",
            (*_SIMULATE, f"{{{part * 1_000}}}..{{{part * 1_000 + 999}}}"),
            "2 of them",
            (*_SIMULATE, f"{{{part * 1_000}}}..{{{part * 1_000 + 1}}}"),
        )
        for part in range(10)
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    commit: str
    is_passed: bool
    is_short: bool
    seconds: int
    command: str
    began: str
    tail: tuple[str, ...]
    """Last lines of the output."""


def first_seed(commit: str) -> int:
    """Return the first of 10,000 seeds of a commit, which another commit hardly has."""
    return int(commit[:8], 16) // 10_000 * 10_000


def load(folder: Path, commit: str) -> dict[tuple[str, bool], Result]:
    """Return the results of a commit by check and form; results of other commits do not count."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = Result(**json.loads(path.read_text(encoding="utf-8")))
        if result.commit == commit:
            found[path.stem.removesuffix("-short"), result.is_short] = result
    return found


def best(results: Mapping[tuple[str, bool], Result], name: str, *, is_short: bool) -> Result | None:
    """Return the result that counts for a form of a check: that of the full form if it passed, else that of this form."""
    full = results.get((name, False))
    return full if full is not None and (full.is_passed or not is_short) else results.get((name, is_short))


def perform(check: Check, commit: str, folder: Path, *, is_short: bool) -> Result:
    """Run a form of a check and keep its result and its output."""
    form = check.form(is_short=is_short)
    first = first_seed(commit)
    words = [re.sub(r"\{(\d+)\}", lambda found: str(first + int(found[1])), word) for word in form.arguments]
    began, start = datetime.now(UTC), time.monotonic()
    path = folder / f"{check.name}{'-short' if is_short else ''}"
    output = path.with_suffix(".txt")
    with output.open("w", encoding="utf-8") as file:
        command = ["env", *form.variables, sys.executable, *words]
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    result = Result(
        commit=commit,
        is_passed=code == 0,
        is_short=is_short,
        seconds=round(time.monotonic() - start),
        command=" ".join([*form.variables, "python", *words]),
        began=began.isoformat(timespec="seconds"),
        tail=tuple(lines[-TAIL_LINES:]),
    )
    path.with_suffix(".json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def page(commit: str, results: Mapping[tuple[str, bool], Result], checks: Sequence[Check] = CHECKS) -> str:
    """Return the page of results. A check counts as passed only in its full form; its short form is named as such."""
    machine = this_machine()
    shown = {check: best(results, check.name, is_short=(check.name, False) not in results) for check in checks}
    passed = [result.is_short for result in shown.values() if result is not None and result.is_passed]
    parts = [
        f"# Gate of {project_version()}\n",
        f"Commit `{commit}`. {passed.count(False)} of {len(checks)} checks passed in full, "
        f"{passed.count(True)} more only in the short form.\n",
        f"Machine: {machine.processor}, {machine.cores} cores, {machine.memory_bytes >> 30} GiB, {machine.system}, "
        f"{machine.python}.\n",
        "| check | what it shows | form | result | duration | began |\n|---|---|---|---|---|---|",
    ]
    for check, result in shown.items():
        if result is None:
            parts.append(f"| {check.name} | {check.what} | | **not run** | | |")
        else:
            form, verdict = "short" if result.is_short else "full", "passed" if result.is_passed else "**failed**"
            what = check.form(is_short=result.is_short).what
            parts.append(f"| {check.name} | {what} | {form} | {verdict} | {result.seconds} s | {result.began} |")
    for check, result in shown.items():
        if result is not None:
            tail = "\n".join(result.tail)
            parts.append(f"\n## {check.name}\n\n`{result.command}`\n\n```\n{tail}\n```")
    parts.append("\nNot part of the gate: a Kubernetes cluster, a container engine, a registry of packages or images.")
    return "\n".join(parts) + "\n"


def run(
    commit: str,
    folder: Path,
    to: Path,
    names: Sequence[str],
    checks: Sequence[Check] = CHECKS,
    *,
    is_short: bool = False,
) -> int:
    """Run those of the named checks that have not passed, write the page after each, and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    results = load(folder, commit)
    for check in checks:
        found = best(results, check.name, is_short=is_short)
        if check.name in names and (found is None or not found.is_passed):
            print(f"{check.name}: {check.form(is_short=is_short).what}", flush=True)
            results[check.name, is_short] = found = perform(check, commit, folder, is_short=is_short)
            print(f"  {'passed' if found.is_passed else 'failed'} after {found.seconds} s", flush=True)
        to.write_text(page(commit, results, checks), encoding="utf-8")
    print(f"The results are in {to}.")
    ends = [best(results, check.name, is_short=is_short) for check in checks]
    return 0 if all(end is not None and end.is_passed for end in ends) else 1


def main(arguments: list[str]) -> int:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="./dev gate", description="Run what a commit has to pass before a release.")
    parser.add_argument("--only", action="append", choices=names, help="only these checks; the others count as not run")
    parser.add_argument(
        "--short", action="store_true", help="the short form of each check; it does not count for a release"
    )
    given = parser.parse_args(arguments)
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGES}"):
        print("Files were changed since the last commit. Next: commit them, so that the results have a commit.")
        return 2
    to = ROOT / PAGES.replace("*", project_version().rpartition(".")[0])
    return run(git("rev-parse", "HEAD"), STATE, to, given.only or names, is_short=given.short)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
