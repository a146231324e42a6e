"""Keeping something in step with documents of the coordinator, for as long as the process lives.

Take a token, then look and act, then wait with that token: so a change that comes while we act is noticed afterwards. A
failure is logged once, and retried when a document has changed. Only while the coordinator does not answer is it retried
after a pause, because its return is no change of a document.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, IncompatibleVersion, LevelUnknown, NameInUse, NodeMissing

AGAIN_SECONDS = 1.0
log = logging.getLogger("waltz.server")


class Reconciler:
    def __init__(
        self, name: str, *, wait: Callable[[object | None], Awaitable[object]], act: Callable[[], Awaitable[None]]
    ) -> None:
        """`wait` is one of the waits of `Cluster`; `act` brings everything in step. `name` is for messages."""
        self.name = name
        self.trouble = ""
        """Sentence that says why it is not in step; empty if it is."""
        self._wait = wait
        self._act = act

    async def run(self) -> None:
        """Run for ever; raise `NameInUse`, `LevelUnknown` or `IncompatibleVersion`: this process must not continue then."""
        seen: object | None = None
        while True:
            try:
                seen = await self._wait(seen)
                await self._act()
            except (NameInUse, LevelUnknown, IncompatibleVersion):
                raise
            except CannotConnect as error:
                self._say(error)
                seen = None
                await asyncio.sleep(AGAIN_SECONDS)
            except NodeMissing as error:
                self._say(error)
            except ChangedMeanwhile:
                continue  # another process was faster, so there is a change to notice already
            except WaltzError as error:
                self._say(error)
            else:
                self._end_of_trouble()

    def _say(self, error: WaltzError) -> None:
        if error.message != self.trouble:
            self.trouble = error.message
            log.warning("%s: %s %s; nothing new is begun", self.name, error.code, error.message, extra=error.facts)

    def _end_of_trouble(self) -> None:
        if self.trouble:
            log.info("%s: in step again", self.name)
        self.trouble = ""
