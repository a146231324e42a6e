"""The Debian package: `/opt/waltz`, units, users, and the settings of both daemons as files that an upgrade keeps.

Nothing is started when it is installed, because a daemon needs its settings first (docs/operating-daemons.md)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.release.packages import ROOT
from tests.release.tree import PYTHON

UNITS = ("waltz-storage.service", "waltz-server.service")
SETTINGS = ("storage.yml", "server.yml")
_CONTROL = """Package: waltz
Version: {version}
Architecture: amd64
Maintainer: The Waltz maintainers <maintainers@waltz.example>
Installed-Size: {kilobytes}
Depends: python{python}, libc6, libgcc-s1, libstdc++6
Recommends: systemd
Section: database
Priority: optional
Description: distributed write-ahead log with optimistic locks
 The daemons waltzd storage and waltzd server, and the tool waltzctl.
"""
_SYSUSERS = """u waltz-storage - "Waltz storage" /var/lib/waltz/storage /usr/sbin/nologin
u waltz-server - "Waltz server" /var/lib/waltz-server /usr/sbin/nologin
"""
_POSTINST = """#!/bin/sh
set -e
if [ "$1" = configure ]; then
    systemd-sysusers --root="${DPKG_ROOT:-/}" waltz.conf
    if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
fi
"""
_POSTRM = """#!/bin/sh
set -e
if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
"""


def build_debian_package(folder: Path, version: str, target: Path, seconds: int) -> Path:
    """Build `waltz_VERSION_amd64.deb` of a folder with `opt/waltz`, to which the other files are added. A running daemon is
    left alone when the package is installed or upgraded."""
    texts = {f"usr/lib/systemd/system/{name}": _config(name) for name in UNITS}
    texts |= {f"etc/waltz/{name}": _config(name) for name in SETTINGS}
    texts |= {"usr/lib/sysusers.d/waltz.conf": _SYSUSERS, "usr/share/doc/waltz/copyright": _text("LICENSE")}
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
    texts |= {
        "DEBIAN/control": _CONTROL.format(version=version, kilobytes=size, python=PYTHON),
        "DEBIAN/conffiles": "".join(f"/etc/waltz/{name}\n" for name in SETTINGS),
        "DEBIAN/postinst": _POSTINST,
        "DEBIAN/postrm": _POSTRM,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if path.name in ("postinst", "postrm") else 0o644)
    for name in ("waltzd", "waltzctl"):
        link = folder / "usr" / "bin" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"/opt/waltz/bin/{name}")
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    package = target / f"waltz_{version}_amd64.deb"
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds)}
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z6", "--build", str(folder), str(package)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return package


def _config(name: str) -> str:
    return _text(f"configs/{name}")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
