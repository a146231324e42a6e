"""Wheel and sdist of a commit, the same bytes each time: all dates are that of the commit, and no file of the folder counts
that is not in the commit."""

from __future__ import annotations

import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILD = "import sys; from setuptools.build_meta import build_{0} as build; build(sys.argv[1])"
_VERSION = re.compile(r'^version = "(.*)"$', re.M)
UMASK = 0o022
"""Modes of files are in both packages."""


def project_version() -> str:
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit_seconds(commit: str) -> int:
    """Return the time of a commit, in seconds since 1970."""
    return int(git("show", "--no-patch", "--format=%ct", commit))


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract an archive of our own as it is. `extractall` has a `filter` from Python 3.11.4 on."""
    archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    archive.extractall(folder)


def check_out(commit: str, folder: Path, *, version: str | None = None) -> Path:
    """Write the files of a commit into a new folder, with another version number if one is given."""
    folder.mkdir(parents=True)
    command = ["git", "-C", str(ROOT), "-c", f"tar.umask={UMASK:04o}", "archive", commit]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        unpack(archive, folder)
    if version is not None:
        project = folder / "pyproject.toml"
        text, changed = _VERSION.subn(f'version = "{version}"', project.read_text(encoding="utf-8"))
        assert changed == 1, "the version is one line of pyproject.toml"
        project.write_text(text, encoding="utf-8")
    return folder


def build_sdist(source: Path, target: Path, seconds: int) -> Path:
    _run("sdist", source, target, seconds)
    (built,) = target.glob("waltzd-*.tar.gz")
    _make_equal(built, seconds)
    return built


def build_wheel(source: Path, target: Path, seconds: int) -> Path:
    _run("wheel", source, target, seconds)
    (built,) = target.glob("waltzd-*.whl")
    return built


def build_wheel_of_sdist(sdist: Path, target: Path, seconds: int) -> Path:
    """Build the wheel from the unpacked sdist, as an index does it."""
    folder = target / "unpacked"
    with tarfile.open(sdist) as archive:
        unpack(archive, folder)
    (source,) = folder.iterdir()
    return build_wheel(source, target, seconds)


def build_site(source: Path) -> Path:
    """Build the site of the documentation of a checkout; return its folder."""
    command = [sys.executable, "-m", "tests.site"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "build/site/site"


def _run(kind: str, source: Path, target: Path, seconds: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds)}
    command = [sys.executable, "-c", _BUILD.format(kind), str(target.absolute())]
    done = subprocess.run(command, cwd=source, env=environment, umask=UMASK, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _make_equal(sdist: Path, seconds: int) -> None:
    """Write an sdist again with the names in order, and without dates and users of this machine, which setuptools keeps."""
    with tarfile.open(sdist) as archive:
        found = [(one, _content(archive, one)) for one in archive]
    for one, _ in found:
        one.uid = one.gid = 0
    sdist.write_bytes(packed(sorted(found, key=lambda pair: pair[0].name), seconds))


def _content(archive: tarfile.TarFile, one: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(one)
    return b"" if file is None else file.read()


def packed_folder(folder: Path, name: str, seconds: int) -> bytes:
    """Return a `tar.gz` of the files of a folder, below `name`."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            one = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
            found.append((one, path.read_bytes()))
    return packed(found, seconds)


def packed(files: list[tuple[tarfile.TarInfo, bytes]], seconds: int) -> bytes:
    """Return a `tar.gz` of these files (`archived`)."""
    return gzip.compress(archived(files, seconds), compresslevel=6, mtime=0)


def archived(files: list[tuple[tarfile.TarInfo, bytes]], seconds: int) -> bytes:
    """Return a `tar` of these files in this order. All dates are `seconds`; owners have numbers and no names."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for one, content in files:
            one.mtime, one.uname, one.gname, one.pax_headers = seconds, "", "", {}
            one.size = len(content)
            archive.addfile(one, io.BytesIO(content))
    return raw.getvalue()
