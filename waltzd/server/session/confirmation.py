"""Confirmation that a session still holds: by its lease, by acknowledgements of its append streams, or by a round of
questions to its storages, shared by all callers.

How to think about it. An owner that was paused and replaced does not know it. The new owner has first fenced a majority
of the members. Suppose a majority of the members, of those that count, reports after a read came in that they are not
fenced by a newer session. Then no server had replaced us when the read came in, and our committed mark was the newest.
The answer to a question that was asked before the read came in proves nothing: a caller that comes during a round waits
for the next round.

A storage checks the session before it takes an append. So an acknowledgement of what was sent after the read came in is
such a report, and costs nothing while appends flow. On an idle stream the newest batch is sent once more, and the storage
acknowledges that it holds it (`Replicator.prove`). Only a storage that does not acknowledge soon is asked for its status.

One case needs care: the same owner gives way to its next session by one write to its document, and that session may have
other members. From that write on a new owner need not ask the members of this session. So no round begins before the
change of session is over.
"""

from __future__ import annotations

import asyncio

from waltzd.errors import NotReady, WaltzError
from waltzd.errors.operations import SessionEnded
from waltzd.server.core.progress import Marks, is_bound
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.server.session.replicated_log import ReplicatedLog

CONFIRM_SECONDS = 2.0
"""Time for a majority to confirm the session."""
PROOF_SECONDS = 0.2
"""Time for a majority to acknowledge on their append streams, before they are asked for their status."""


class SessionConfirmation:
    def __init__(self, log: ReplicatedLog) -> None:
        self._log = log
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """Round that has not asked any storage yet, so that new callers may share it."""

    async def confirm(self) -> None:
        """Return when a majority has confirmed our session after this call began; raise `NotReady` or `SessionEnded`
        otherwise. Return at once while the lease holds (`server.core.progress`)."""
        if self.is_leased:
            return
        if self._next is None:
            self._next = asyncio.create_task(self._wait_and_ask(self._current))
            self._next.add_done_callback(_look_at)
        await asyncio.shield(self._next)

    @property
    def is_leased(self) -> bool:
        """Return whether no server can have replaced us yet."""
        log, marks = self._log, self._log.marks
        if marks is None or marks.lease is None or log.ended is not None:
            return False
        return marks.lease.holds(marks.counted, log.settings.clock())

    async def _wait_and_ask(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._current, self._next = self._next, None
        log, problems = self._log, dict[str, str]()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                seen = log.decided.version
                while not await self._ask(problems):
                    await log.decided.wait(seen)
                    seen = log.decided.version
        except TimeoutError:
            self._check()
            why = "; ".join(problems.values()) or "it gives way to another session"
            raise NotReady(
                f"no majority confirmed within {CONFIRM_SECONDS:g} seconds that session {log.session} of partition "
                f"{log.partition} still holds: {why}",
                partition=log.partition,
            ) from None

    def _check(self) -> None:
        if self._log.ended is not None:
            raise SessionEnded(f"session {self._log.session} of partition {self._log.partition} has ended")

    async def _ask(self, problems: dict[str, str]) -> bool:
        """Ask one round; return False if it cannot confirm anything before something has changed."""
        log = self._log
        self._check()
        if log.marks is None or log.sending_up_to is not None:
            return False
        marks, session, meta, lease = log.marks, log.session, log.core.meta, log.marks.lease
        asked_at = log.settings.clock() if lease is not None else 0.0
        proven = await self._acknowledged(marks)
        if lease is not None:
            for name in proven:
                lease.renew(name, asked_at)
        if marks.confirms(proven):
            return True
        asked_at = log.settings.clock() if lease is not None else 0.0
        bound: dict[str, None] = {}
        answered, came = 0, ChangeSignal()

        async def ask(name: str) -> None:
            nonlocal answered
            try:
                status = await log.port(name).status(log.partition)
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

    async def _acknowledged(self, marks: Marks) -> dict[str, None]:
        """Return the members that have acknowledged something that was sent after this call: a majority, or those that
        did so within `PROOF_SECONDS`."""
        came, replicators = ChangeSignal(), self._log.replicators
        asked = {name: replicators[name].prove() for name in marks.members if name in replicators}
        questions = {name: question for name, question in asked.items() if question is not None}
        proven: dict[str, None] = {}
        try:
            if not marks.confirms(questions):
                return proven
            for question in questions.values():
                question.add_done_callback(lambda _: came.notify())
            async with asyncio.timeout(PROOF_SECONDS):
                while True:
                    ended = {name: question for name, question in questions.items() if question.done()}
                    proven = {name: None for name, question in ended.items() if not question.cancelled()}
                    if marks.confirms(proven) or len(ended) == len(questions):
                        return proven
                    await came.wait(came.version)
                    self._check()
        except TimeoutError:
            return proven
        finally:
            for question in questions.values():
                question.cancel()


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a round. All callers got it already, or have gone."""
    if not task.cancelled():
        task.exception()
