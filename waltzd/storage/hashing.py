"""Digests of what a replica holds, a piece at a time.

Each piece is read and hashed in a turn of its own on a thread for readers, so that whoever else reads comes between, and
appends, which have other threads, are never held up. An answer ends after so many bytes or seconds: it says how far it
came, and the caller goes on from there. So a call has an end however long the log is and however slow the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from waltzd.digest import Digest, Hashing
from waltzd.errors import BadArgument, BeyondLog, PartitionDamaged
from waltzd.record import Run

ANSWER_BYTES_MAX = 64 << 20
ANSWER_SECONDS_MAX = 5.0


async def hashed(
    read: Callable[[int], Awaitable[Run]], run_blocking: Callable[..., Awaitable[None]], first_id: int, last_id: int
) -> Digest:
    """`read` gives sound records from an id on. What is damaged or not known to be committed ends the digest in front of
    it, and is an error where the digest would begin."""
    if not 0 <= first_id <= last_id:
        raise BadArgument(f"ids {first_id} to {last_id} are no range")
    hashing, clock = Hashing(first_id), asyncio.get_running_loop().time
    ends = clock() + ANSWER_SECONDS_MAX
    while hashing.next_id <= last_id:
        try:
            run = await read(hashing.next_id)
        except (PartitionDamaged, BeyondLog):
            if hashing.next_id == first_id:
                raise
            break
        await run_blocking(hashing.add, run)
        if hashing.bytes >= ANSWER_BYTES_MAX or clock() >= ends:
            break
    return hashing.digest()
