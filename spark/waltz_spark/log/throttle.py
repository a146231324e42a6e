"""So many bytes a second at most, over all streams that share it.

Whoever has received something waits until that much could have come at the agreed rate; the other side then feels that
nobody takes more. What was not used in a short while before is kept, so that the rate is met on the average.
"""

from __future__ import annotations

import asyncio

CREDIT_SECONDS = 0.25


class Throttle:
    def __init__(self, bytes_per_second: int | None) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate = bytes_per_second
        self._free_at: float | None = None

    def __reduce__(self) -> tuple[type[Throttle], tuple[int | None]]:
        """Elsewhere it begins anew: another process has another clock."""
        return Throttle, (self._rate,)

    def delay(self, size: int, now: float) -> float:
        """How many seconds to wait for having taken so many bytes."""
        if self._rate is None:
            return 0.0
        start = now if self._free_at is None else max(self._free_at, now - CREDIT_SECONDS)
        self._free_at = start + size / self._rate
        return max(0.0, self._free_at - now)

    async def wait(self, size: int) -> None:
        seconds = self.delay(size, asyncio.get_running_loop().time())
        if seconds:
            await asyncio.sleep(seconds)
