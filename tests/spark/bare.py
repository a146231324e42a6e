"""A Python like that of a worker: some packages, and no Waltz. Nothing is downloaded, and nothing is copied."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

FOR_FILES = ("numpy", "pyarrow")


def bare_python(home: Path, packages: Iterable[str]) -> Path:
    """The interpreter of a new environment that has these, by links to where this one has them."""
    venv.EnvBuilder(symlinks=True).create(home)
    there = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for package in packages:
        files = metadata.files(package)
        assert files is not None
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            given = metadata.distribution(package).locate_file(top)
            if not (there / top).exists():
                (there / top).symlink_to(str(given))
    return home / "bin" / "python"


def forked(path: Path, *, on_workers: Path) -> Path:
    """A path that leads to one Python here and to another one where Spark runs tasks, as on two machines."""
    path.write_text(
        f'#!/bin/sh\nif [ -n "$SPARK_EXECUTOR_DIRS" ]; then exec {on_workers} "$@"; fi\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def packed(path: Path, python: Path) -> Path:
    """An archive with bin/python."""
    inside = path.with_name(f"{path.name}.files")
    (inside / "bin").mkdir(parents=True)
    script = inside / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    script.chmod(0o755)
    return Path(shutil.make_archive(str(path), "gztar", inside))
