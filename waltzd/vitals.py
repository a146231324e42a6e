"""What a process can find out about itself at this moment: the clock and the files. For answers to operators only."""

from __future__ import annotations

import os
import resource
import time

from waltzd.process import Vitals

_DESCRIPTORS = "/proc/self/fd"


def vitals() -> Vitals:
    try:
        open_files: int | None = len(os.listdir(_DESCRIPTORS)) - 1  # without the one that looks
    except OSError:  # no /proc here, or no descriptor left to look with
        open_files = None
    return Vitals(
        time_ms=time.time_ns() // 1_000_000,
        open_files=open_files,
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
