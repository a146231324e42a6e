"""When the certificate of this process ends: a warning in the log in time, and a reason not to be ready afterwards.

Without a valid certificate the daemon reaches no other process and is reached by none, streams between servers and storages
end, and it cannot be started again. So the log says it once a day in the last week, when it is over, and each day from then
on. A new certificate begins a new story: the files are looked at for every question.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from waltzd.daemon import readiness
from waltzd.wire.tls import Tls, moment

DAY_SECONDS = 86_400
NEAR_SECONDS = 7 * DAY_SECONDS
LOOK_SECONDS = 60.0
_log = logging.getLogger("waltz.tls")


class Expiry:
    def __init__(self, tls: Tls | None, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970."""
        self._tls = tls
        self._clock = clock
        self._said: tuple[float, int] | None = None
        """What was logged last: the end of the certificate, and the day before or behind it."""

    def seconds_left(self) -> float | None:
        """Negative when it is over; None without a certificate."""
        return None if self._tls is None else self._tls.current().ends - self._clock()

    def reasons(self) -> list[str]:
        """Why the daemon is not ready."""
        return readiness.of_certificate(self.seconds_left())

    def look(self) -> None:
        """Log what is due today."""
        if self._tls is None:
            return
        ends = self._tls.current().ends
        left = ends - self._clock()
        today = ends, int(left // DAY_SECONDS)
        if left >= NEAR_SECONDS or today == self._said:
            return
        self._said = today
        path = self._tls.path
        if left >= 0:
            _log.warning("the certificate %s ends at %s: put another one in its place before", path, moment(ends))
        else:
            _log.error("the certificate %s ended at %s: nobody new is reached or gets in until another one is in its "
                       "place, and streams between servers and storages end", path, moment(ends))  # fmt: skip

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
