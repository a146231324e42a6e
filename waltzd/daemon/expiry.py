"""The end of the certificate of a process: a warning in the log in time, and a reason to be not ready afterwards.

Without a valid certificate, a daemon can neither call nor be called, its streams to other daemons end, and it cannot be
restarted. So the log warns once a day in the last week, and once a day after the end. The files are read for every check,
so a new certificate takes effect at once.
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
        """Last line that was logged: the end of the certificate, and the days until it; None before the first."""

    def seconds_left(self) -> float | None:
        """Return the seconds until the certificate ends, negative after its end; None without a certificate."""
        return None if self._tls is None else self._tls.current().ends - self._clock()

    def reasons(self) -> list[str]:
        """Return the reasons why the daemon is not ready because of its certificate."""
        return readiness.of_certificate(self.seconds_left())

    def look(self) -> None:
        """Log a warning or an error that is due today."""
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
            _log.error("the certificate %s ended at %s: new connections fail until another one is in its "
                       "place, and streams between servers and storages end", path, moment(ends))  # fmt: skip

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)
