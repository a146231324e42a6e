"""Environments with other versions of Waltz: the version before, built from its commit, and one of the future.

An environment has an interpreter of its own and one wheel; what Waltz stands on is that of the tests. All workers of a run
share them, and so do later runs: the name of a folder says what is in it.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.release.packages import ROOT, build_wheel, check_out, commit_seconds, git

BEFORE = "2acc4b4dba98ee5147834384781b2634174aab93"
"""Commit of version 0.0: the last one without levels. It was never published, and so has no number of its own."""
PROGRAMS = ("waltzd", "waltzctl", "pytest", "uvicorn")
"""Programs in the `bin` of an environment."""
_FOLDER = ROOT / "build" / "versions"


def environment(commit: str, version: str, *edits: tuple[str, str, str]) -> Path:
    """Return the interpreter of an environment with the wheel of a commit under this version number. `edits`: files of the
    commit, each with a text in it and the one that replaces it."""
    commit = git("rev-parse", commit)
    name = f"{version}-{commit[:12]}"
    home = _FOLDER / name
    python = home / "bin" / "python"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "made").exists():
            _make(home, commit, version, edits)
    return python


def _make(home: Path, commit: str, version: str, edits: Sequence[tuple[str, str, str]]) -> None:
    subprocess.run(["rm", "-rf", home], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    source = check_out(commit, home / "source", version=version)
    for path, old, new in edits:
        text = (source / path).read_text(encoding="utf-8")
        assert text.count(old) == 1, (path, old)
        (source / path).write_text(text.replace(old, new), encoding="utf-8")
    wheel = build_wheel(source, home / "wheel", commit_seconds(commit))
    (packages,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # A plain path: files *.pth in that folder, such as the one for the checkout, do not count.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    for name in PROGRAMS:
        program = home / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -P -m {name} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    (home / "made").touch()
