"""Rules for versions of Waltz that work on one cluster at a time. Pure.

Versions change one process after another, so a cluster runs two versions during an upgrade. Two rules make this safe.
Servers, and storages with their servers, differ by at most one minor version; clients work with every server of their major
version. And a cluster has a *level*, in its root document: an ability that an older version could not read or undo waits
until an operator raises the level (`waltzctl cluster finalize`). Until then the older version can come back. Afterwards it
is refused.

A version reports no level: the table below gives the newest level that each release supports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from waltzd.errors.operations import IncompatibleVersion, LevelUnknown

Release: TypeAlias = tuple[int, int]
"""Major and minor version."""
RELEASE: Release = 0, 1
"""Release that this program belongs to, as in `pyproject.toml`."""
LEVELS: dict[Release, int] = {(0, 0): 0, (0, 1): 1}
"""First release that supports each level. Level 0 is that of root documents without a level."""
ARCHIVED_KEYS = 1
"""Level from which key indexes are archived: older versions cannot read a manifest that names one."""
LEVEL_MAX = 1000
"""Highest level that a root document may have."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})")
OLDEST: Release = min(LEVELS)
"""Oldest release from which a cluster can be upgraded to this one."""


def release_of(version: str) -> Release:
    """Return the release of a version; the oldest if `version` is empty, as in reports of versions before 0.1."""
    found = _VERSION.match(version)
    return OLDEST if found is None else (int(found[1]), int(found[2]))


@dataclass(frozen=True)
class Program:
    """A version of Waltz as the code of a process: what it supports, and what it accepts of processes of other versions."""

    release: Release
    levels: Mapping[Release, int]
    """First release that supports each level, as far as this program knows."""

    @property
    def version(self) -> str:
        """First version of the release."""
        return f"{_text(self.release)}.0"

    @property
    def level(self) -> int:
        """Newest level that this program supports."""
        return self.levels[self.release]

    def level_of(self, version: str) -> int:
        """Return the newest level that this program knows a version to support; at least its own for newer versions."""
        release = release_of(version)
        return max((level for since, level in self.levels.items() if since <= release), default=0)

    def check_level(self, level: int, path: str) -> None:
        """Raise `LevelUnknown` if the cluster was finalized for a newer version than this program."""
        if level > self.level:
            raise LevelUnknown(
                f"{path}: the cluster has level {level}; this version of Waltz, {_text(self.release)}, supports levels to "
                f"{self.level}",
                path=path,
                level=level,
            )

    def check_server(self, name: str, version: str) -> None:
        """Raise `IncompatibleVersion` if a running server is more than one minor version away from this program."""
        self._check_apart(f"server {name}", version)

    def check_storage(self, name: str, version: str, level: int) -> None:
        """Raise `IncompatibleVersion` if a storage is too old for the level of the cluster, or more than one minor version
        away from this program."""
        self._check_apart(f"storage {name}", version)
        if self.level_of(version) < level:
            needed = min(release for release, newest in self.levels.items() if newest >= level)
            raise IncompatibleVersion(
                f"storage {name} runs version {version or 'before ' + _text(needed)}, and the cluster was finalized at "
                f"level {level}, which needs version {_text(needed)}",
                not_done="its replicas do not take part",
                next_step=f"install version {_text(needed)} or newer on {name}, and start it again",
            )

    def check_client(self, version: str) -> None:
        """Raise `IncompatibleVersion` if a client is of another major version. Accept one that reports no version."""
        ours, major = self.release[0], release_of(version)[0]
        if version and major != ours:
            raise IncompatibleVersion(
                f"the client library has version {version}, and this server {_text(self.release)}: their major "
                "versions differ",
                not_done="the client got no id, and nothing was written",
                next_step=f"use a client library of version {ours}.x",
            )

    def _check_apart(self, who: str, version: str) -> None:
        ours, theirs = self.release, release_of(version)
        older, newer = sorted((theirs, ours))
        if newer in (older, (older[0], older[1] + 1), (older[0] + 1, 0)):
            return
        raise IncompatibleVersion(
            f"{who} runs version {version or _text(theirs)}, and this is version {_text(ours)}: in one cluster versions "
            "differ by at most one minor version",
            not_done="this process does not work with it",
            next_step="upgrade one minor version at a time, every process before the next version (docs/upgrade.md)",
        )


THIS = Program(RELEASE, LEVELS)
"""The program that is running."""


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
