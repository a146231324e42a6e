"""What a machine or an image gets of Waltz: `/opt/waltz`, with the wheel, what it stands on, and three programs.

The Debian package and the image are made of this one tree. It needs the Python of Debian 12 and nothing else. The packages
are those of `requirements.lock`, with their hashes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from tests.release.packages import ROOT
from tests.sbom import locked, requirements

PYTHON = "3.11"
"""Python of Debian 12."""
EXTRAS = ("archive", "daemon")
HOME = Path("opt/waltz")
_PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64")
_PROGRAM = f"""#!/usr/bin/python{PYTHON} -I
import sys

sys.path.insert(0, "/opt/waltz/lib")
"""
_HEALTH = """import urllib.error
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:9100/healthz", timeout=5)
except (OSError, urllib.error.URLError) as error:
    sys.exit(f"not healthy: {error}")
"""
PROGRAMS = {
    "waltzd": "from waltzd.__main__ import main\n\nsys.exit(main())\n",
    "waltzctl": "from waltzctl.main import main\n\nsys.exit(main())\n",
    "waltz-healthy": _HEALTH,
}
"""Programs in `/opt/waltz/bin`. The last one is for images, which have no shell and no curl."""


def machine_requirements() -> str:
    """Return what a machine of a cluster installs, with hashes, for pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return requirements(project, locked((ROOT / "requirements.lock").read_text(encoding="utf-8")), EXTRAS)


def make_tree(wheel: Path, folder: Path) -> Path:
    """Write `opt/waltz` below `folder`; return `folder`."""
    home = folder / HOME
    home.mkdir(parents=True)
    wanted = home / "requirements.txt"
    wanted.write_text(machine_requirements(), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
    ]
    command += ["--require-hashes", "--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    done = subprocess.run(
        [*command, "--target", home / "lib", "--requirement", wanted], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(home / "lib" / "bin", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        ours = [one for one in archive.namelist() if ".data/" not in one and not one.startswith("waltz_spark/")]
        archive.extractall(home / "lib", ours)
    (home / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = home / "bin" / name
        program.write_text(_PROGRAM + text, encoding="utf-8")
        program.chmod(0o755)
    for path in folder.rglob("*"):
        if path.is_dir() or path.is_file():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return folder
