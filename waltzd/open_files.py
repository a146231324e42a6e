"""How many files and connections this process may have open: as many as the system lets it."""

from __future__ import annotations

import resource

WANTED = 65536


def allow_open_files() -> None:
    """Segments, indexes and connections are files to the system, and its usual limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(WANTED, hard) if hard != resource.RLIM_INFINITY else WANTED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
