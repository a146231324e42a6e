"""Whether a session still holds: by its lease, or by a round to its storages, shared by all that want to know.

How to think about it. An owner that was paused and replaced does not know that. Whoever replaced it had a majority of the
members promise themselves to a newer session first. So when a majority, of members that count, says after a read came in
that its promise is still to this session, nobody had replaced us when it came in, and our committed mark was the mark.
An answer to a question that was asked before the read came in proves nothing: who comes during a round waits for the next.

One case needs care: the same owner gives way to its next session by one write to its document, and that session may have
other members. From that write on a replacement need not ask the members of this session. No round begins before that is
over.
"""

from __future__ import annotations

import asyncio

from waltzd.errors import NotReady, SessionEnded, WaltzError
from waltzd.server.core.progress import is_bound
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.partition_leader import PartitionLeader

CONFIRM_SECONDS = 2.0
"""How long a majority may take to say that the session still holds."""


class Confirming:
    def __init__(self, leader: PartitionLeader) -> None:
        self._leader = leader
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """It has not asked anybody yet: whoever comes now may share it."""

    async def confirm(self) -> None:
        """Return when a majority has said, after this was called, that it is bound to our session; raises otherwise.
        While the lease holds (`server.core.lease`) that is at once."""
        if self.is_leased:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._wait_and_ask(self._current))
            self._next.add_done_callback(_look_at)
        await asyncio.shield(self._next)

    @property
    def is_leased(self) -> bool:
        """Whether nobody can have replaced us yet."""
        leader, marks = self._leader, self._leader.marks
        if marks is None or marks.lease is None or leader.ended is not None:
            return False
        return marks.lease.holds(marks.counted, leader.settings.clock())

    async def _wait_and_ask(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._current, self._next = self._next, None
        leader, problems = self._leader, dict[str, str]()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                seen = leader.decided.version
                while not await self._ask(problems):
                    await leader.decided.wait(seen)
                    seen = leader.decided.version
        except TimeoutError:
            self._check()
            why = "; ".join(problems.values()) or "it gives way to another session"
            raise NotReady(
                f"no majority confirmed within {CONFIRM_SECONDS:g} seconds that session {leader.session} of partition "
                f"{leader.partition} still holds: {why}",
                partition=leader.partition,
            ) from None

    def _check(self) -> None:
        if self._leader.ended is not None:
            raise SessionEnded(f"session {self._leader.session} of partition {self._leader.partition} has ended")

    async def _ask(self, problems: dict[str, str]) -> bool:
        """One round; False when it cannot confirm anything before something has changed."""
        leader = self._leader
        self._check()
        if leader.marks is None or leader.sending_up_to is not None:
            return False
        marks, session, meta, lease = leader.marks, leader.session, leader.core.meta, leader.marks.lease
        asked_at = leader.settings.clock() if lease is not None else 0.0
        bound: dict[str, None] = {}
        answered, came = 0, ChangeSignal()

        async def ask(name: str) -> None:
            nonlocal answered
            try:
                status = await leader.port(name).status(leader.partition)
                if is_bound(status, meta.replicas[name].incarnation if name in meta.replicas else None, session):
                    bound[name] = None
                    if lease is not None:
                        lease.renew(name, asked_at)
                else:
                    problems[name] = f"{name} has promised itself to session {status.promised_session}"
            except WaltzError as error:
                problems[name] = f"{name}: {error.message}"
            finally:
                answered += 1
                came.notify()

        problems.clear()
        asking = [asyncio.create_task(ask(name)) for name in marks.members]
        try:
            while not marks.confirms(bound) and answered < len(asking):
                await came.wait(came.version)
                self._check()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return marks.confirms(bound)


def _look_at(task: asyncio.Task[None]) -> None:
    """Those who waited were told; when all of them have gone nobody is left to be."""
    if not task.cancelled():
        task.exception()
