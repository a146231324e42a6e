"""`./dev gate`: what a commit has to pass before it is released, one check after the other, and a page with the results.

It takes hours. When it is interrupted, the same command goes on with the first check that has no result for this commit.
A check that failed is run again; one that passed is not. The page says which checks were not run. The exit code is 0 if all
of them passed."""

from __future__ import annotations

import argparse
import json
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
TAIL_LINES = 5
_SIMULATE = ("-m", "tests.simulation.simulate", "--jobs", "2", "--seeds")
_PYTEST = ("-m", "pytest", "-q")


@dataclass(frozen=True)
class Check:
    """A command of this project's Python that ends with 0 if the commit passes."""

    name: str
    what: str
    """What it shows, for the page."""
    arguments: tuple[str, ...]
    variables: tuple[str, ...] = ()
    """Environment variables, as in NAME=value."""


CHECKS = (
    Check(
        "tests",
        "all tests, also the long ones: mixed versions, release artefacts, tutorial",
        ("-m", "pytest", "-q", "-n", "4", "--dist", "worksteal"),
    ),
    Check(
        "simulation",
        "10,000 seeds that were not run before",
        ("-m", "tests.simulation.simulate", "--jobs", "2", "--seeds", "{first}..{last}"),
    ),
    Check("mutants", "the simulation finds every deliberate bug", ("-m", "tests.simulation.mutants", "--jobs", "2")),
    Check(
        "crash-test",
        "1,000 workloads, crashed before every operation of the disk",
        ("-m", "tests.simulation.crash", "--format", "1"),
    ),
    Check(
        "flips",
        "every flipped bit of a segment is found",
        ("-m", "pytest", "-q", "tests/unit/waltzd/format/test_scan_batches.py"),
        ("WALTZ_FLIPS=1",),
    ),
    Check("chaos", "30 minutes of faults on real processes", ("-m", "tests.chaos", "--minutes", "30")),
    Check("kills", "200 kills", ("-m", "tests.chaos", "--kills", "200")),
    Check("applications", "example applications for ten minutes", ("-m", "tests.applications", "--minutes", "10")),
    Check(
        "groups",
        "16 members of consumer groups on real daemons for ten minutes",
        ("-m", "tests.group_race", "--real", "--members", "16", "--seconds", "600"),
    ),
    Check("peers", "the benchmark beside other systems", ("-m", "tests.bench", "peers")),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    commit: str
    is_passed: bool
    seconds: int
    command: str
    began: str
    tail: tuple[str, ...]
    """Last lines of the output."""


def seeds(commit: str) -> tuple[int, int]:
    """Return 10,000 seeds of a commit, which another commit hardly has."""
    first = int(commit[:8], 16) // 10_000 * 10_000
    return first, first + 9_999


def load(folder: Path, commit: str) -> dict[str, Result]:
    """Return the results of a commit by the name of the check; those of other commits do not count."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = Result(**json.loads(path.read_text(encoding="utf-8")))
        if result.commit == commit:
            found[path.stem] = result
    return found


def perform(check: Check, commit: str, folder: Path) -> Result:
    """Run a check and keep its result and its output."""
    first, last = seeds(commit)
    words = [word.replace("{first}", str(first)).replace("{last}", str(last)) for word in check.arguments]
    began, start = datetime.now(UTC), time.monotonic()
    output = folder / f"{check.name}.txt"
    with output.open("w", encoding="utf-8") as file:
        command = ["env", *check.variables, sys.executable, *words]
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    result = Result(
        commit=commit,
        is_passed=code == 0,
        seconds=round(time.monotonic() - start),
        command=" ".join([*check.variables, "python", *words]),
        began=began.isoformat(timespec="seconds"),
        tail=tuple(lines[-TAIL_LINES:]),
    )
    (folder / f"{check.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return result


def page(commit: str, results: Mapping[str, Result], checks: Sequence[Check] = CHECKS) -> str:
    """Return the page of results."""
    machine = this_machine()
    passed = sum(result.is_passed for result in results.values())
    parts = [
        f"# Gate of {project_version()}\n",
        f"Commit `{commit}`. {passed} of {len(checks)} checks passed.\n",
        f"Machine: {machine.processor}, {machine.cores} cores, {machine.memory_bytes >> 30} GiB, {machine.system}, "
        f"{machine.python}.\n",
        "| check | what it shows | result | duration | began |\n|---|---|---|---|---|",
    ]
    for check in checks:
        result = results.get(check.name)
        verdict = "**not run**" if result is None else "passed" if result.is_passed else "**failed**"
        when = ("", "") if result is None else (f"{result.seconds} s", result.began)
        parts.append(f"| {check.name} | {check.what} | {verdict} | {when[0]} | {when[1]} |")
    for name, result in results.items():
        shown = "\n".join(result.tail)
        parts.append(f"\n## {name}\n\n`{result.command}`\n\n```\n{shown}\n```")
    parts.append("\nNot part of the gate: a Kubernetes cluster, a container engine, a registry of packages or images.")
    return "\n".join(parts) + "\n"


def run(commit: str, folder: Path, to: Path, names: Sequence[str], checks: Sequence[Check] = CHECKS) -> int:
    """Run those of the named checks that have not passed, write the page after each, and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    results = load(folder, commit)
    for check in checks:
        found = results.get(check.name)
        if check.name in names and (found is None or not found.is_passed):
            print(f"{check.name}: {check.what}", flush=True)
            results[check.name] = found = perform(check, commit, folder)
            print(f"  {'passed' if found.is_passed else 'failed'} after {found.seconds} s", flush=True)
        to.write_text(page(commit, results, checks), encoding="utf-8")
    print(f"The results are in {to}.")
    return 0 if all(check.name in results and results[check.name].is_passed for check in checks) else 1


def main(arguments: list[str]) -> int:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="./dev gate", description="Run what a commit has to pass before a release.")
    parser.add_argument("--only", action="append", choices=names, help="only these checks; the others count as not run")
    given = parser.parse_args(arguments)
    if git("status", "--porcelain", "--untracked-files=no"):
        print("Files were changed since the last commit. Next: commit them, so that the results have a commit.")
        return 2
    minor = project_version().rpartition(".")[0]
    to = ROOT / "docs" / f"release-{minor}.md"
    return run(git("rev-parse", "HEAD"), STATE, to, given.only or names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
