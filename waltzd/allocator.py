"""Memory that was freed is used again, whichever thread freed it.

The allocator of glibc gives every thread an arena of its own and keeps in each what was freed there. A daemon moves large
pieces over a few threads, of which only one runs Python at a time: with an arena for all, it needs a third less memory.
Where there is no such allocator, nothing is changed.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8


def share_arena() -> None:
    """To be called before the first thread starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
