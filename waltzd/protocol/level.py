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
from typing import TypeAlias

from waltzd.errors.operations import IncompatibleVersion, LevelUnknown

Release: TypeAlias = tuple[int, int]
"""Major and minor version."""
RELEASE: Release = 0, 1
"""Release that this program belongs to, as in `pyproject.toml`."""
LEVELS: dict[Release, int] = {(0, 0): 0, (0, 1): 1}
"""First release that supports each level. Level 0 is that of root documents without a level."""
LEVEL = LEVELS[RELEASE]
"""Newest level that this program supports."""
LEVEL_MAX = 1000
"""Highest level that a root document may have."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})")
OLDEST: Release = min(LEVELS)
"""Oldest release from which a cluster can be upgraded to this one."""


def release_of(version: str) -> Release:
    """Return the release of a version; the oldest if `version` is empty, as in reports of versions before 0.1."""
    found = _VERSION.match(version)
    return OLDEST if found is None else (int(found[1]), int(found[2]))


def level_of(version: str) -> int:
    """Return the newest level that a version supports, as far as this program knows: at least its own for newer ones."""
    release = release_of(version)
    return max((level for since, level in LEVELS.items() if since <= release), default=0)


def check_level(level: int, path: str) -> None:
    """Raise `LevelUnknown` if the cluster was finalized for a newer version than this program."""
    if level > LEVEL:
        raise LevelUnknown(
            f"{path}: the cluster has level {level}; this version of Waltz, {_text(RELEASE)}, supports levels to {LEVEL}",
            path=path,
            level=level,
        )


def check_server(name: str, version: str, *, ours: Release = RELEASE) -> None:
    """Raise `IncompatibleVersion` if a running server is more than one minor version away from this program."""
    _check_apart(f"server {name}", version, ours)


def check_storage(name: str, version: str, level: int, *, ours: Release = RELEASE) -> None:
    """Raise `IncompatibleVersion` if a storage is too old for the level of the cluster, or more than one minor version
    away from this program."""
    _check_apart(f"storage {name}", version, ours)
    if level_of(version) < level:
        needed = min(release for release, newest in LEVELS.items() if newest >= level)
        raise IncompatibleVersion(
            f"storage {name} runs version {version or 'before ' + _text(needed)}, and the cluster was finalized at level "
            f"{level}, which needs version {_text(needed)}",
            not_done="its replicas do not take part",
            next_step=f"install version {_text(needed)} or newer on {name}, and start it again",
        )


def check_client(version: str, *, ours: Release = RELEASE) -> None:
    """Raise `IncompatibleVersion` if a client is of another major version. Clients that report no version are accepted."""
    major = release_of(version)[0]
    if version and major != ours[0]:
        raise IncompatibleVersion(
            f"the client library has version {version}, and this server {_text(ours)}: their major versions differ",
            not_done="the client got no id, and nothing was written",
            next_step=f"use a client library of version {ours[0]}.x",
        )


def _check_apart(who: str, version: str, ours: Release) -> None:
    theirs = release_of(version)
    older, newer = sorted((theirs, ours))
    if newer in (older, (older[0], older[1] + 1), (older[0] + 1, 0)):
        return
    raise IncompatibleVersion(
        f"{who} runs version {version or _text(theirs)}, and this is version {_text(ours)}: in one cluster versions "
        "differ by at most one minor version",
        not_done="this process does not work with it",
        next_step="upgrade one minor version at a time, every process before the next version (docs/upgrade.md)",
    )


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
