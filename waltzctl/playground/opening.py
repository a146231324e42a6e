"""Waiting until a cluster on this machine takes transactions, and what is said when it does not, or not all of it runs.

A cluster that was made earlier holds what somebody wrote, and a part of it may be enough to work, or to mend the rest with:
so what runs is left running, whatever else fails, and the error says what does and what to type. (What cannot come up for
the first time holds nothing, and is stopped again by whoever started it.)
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from waltzctl.playground.blueprint import ZOOKEEPER
from waltzctl.playground.daemon import Daemon, State
from waltzctl.watching.overview import Overview, look
from waltzctl.watching.verdict import spell
from waltzd.cluster.coordinator import Coordinator
from waltzd.errors import DaemonEnded, PartitionsClosed, WaltzError

OPEN_SECONDS = 60.0
SETTLE_SECONDS = 15.0
"""How long to wait for the last replicas, when all partitions take transactions already; and for partitions to open, when
it is known that a daemon is missing."""
STILL_SECONDS = 2.0
"""Partitions that did not move for so long are where they are wanted, although servers do not have equally many."""
POLL_SECONDS = 0.1
TOLD_PARTITIONS = 5


class Opening:
    """`failed`: daemons that did not come up, and why; who ends while this waits is added. Of a cluster that is new, the
    first that fails is raised instead."""

    def __init__(
        self,
        daemons: Mapping[str, Daemon],
        server_names: Iterable[str],
        failed: dict[str, WaltzError],
        *,
        is_new: bool,
        say: Callable[[str], None],
        show: Callable[[str, State], None],
    ) -> None:
        self._daemons = daemons
        self._server_names = list(server_names)
        self._failed = failed
        self._is_new = is_new
        self._say, self._show = say, show

    async def wait(self, coordinator: Coordinator) -> Overview:
        """Until every partition takes transactions with all of its replicas. When that takes long: without some of them,
        or with partitions that are closed."""
        started = moved = time.monotonic()
        owners: list[str | None] = []
        while True:
            self._check_running()
            found = await look(coordinator)
            now = time.monotonic()
            if owners != (owners := [partition.owner for partition in found.partitions]):
                moved = now
            seconds = now - started
            is_settled = self._is_whole(found) and (is_even(found) or now - moved > STILL_SECONDS)
            if not found.closed and (self._failed or seconds > SETTLE_SECONDS or is_settled):
                return found
            if seconds > (SETTLE_SECONDS if self._failed else OPEN_SECONDS):
                return found
            self._say(f"waiting for partitions: {len(found.partitions) - len(found.closed)} are open")
            await asyncio.sleep(POLL_SECONDS)

    def _check_running(self) -> None:
        for name, daemon in self._daemons.items():
            if name in self._failed:
                continue
            try:
                daemon.check_running()
            except DaemonEnded as error:
                self._show(name, State.ENDED)
                if self._is_new or name == ZOOKEEPER:
                    raise
                self._failed[name] = error

    def _is_whole(self, found: Overview) -> bool:
        """Every replica takes part, and every server is there."""
        there = {view.meta.name for view in found.servers if view.said is not None}
        return not found.short and there.issuperset(self._server_names)


def is_even(found: Overview) -> bool:
    owned = [len(view.said.partitions) for view in found.servers if view.said is not None and not view.meta.is_draining]
    return not owned or max(owned) - min(owned) <= 1


# -- what is said ------------------------------------------------------------------------------------------------------


def closed(found: Overview) -> PartitionsClosed:
    """Of a cluster that is new: nothing of it stays."""
    return _closed(found, DaemonEnded.not_done, "read the logs of the daemons; `waltzctl up` again goes on from here")


def unfinished(
    directory: Path, found: Overview, running: Sequence[str], failed: Mapping[str, WaltzError]
) -> WaltzError | None:
    """Of a cluster that was there before: what is missing, while the rest runs."""
    if not failed:
        stays = f"{_stays(running)}, and nothing was stopped"
        takes = spell((view.partition for view in found.closed), "takes", "take")
        return _closed(found, f"{takes} no transactions yet; {stays}", _mending(directory)) if found.closed else None
    if found.closed:
        partitions = f"{spell((view.partition for view in found.closed), 'takes', 'take')} no transactions"
    else:
        partitions = "every partition takes transactions all the same"
    missing = f"{', '.join(failed)} {'is' if len(failed) == 1 else 'are'} not ready"
    first = next(iter(failed.values()))
    again = f"read what it says in its log, then `waltzctl up {shlex.quote(str(directory))} --detach` again"
    return type(first)(
        "\n".join(error.message for error in failed.values()),
        not_done=f"{missing}; {partitions}. {_stays([name for name in running if name not in failed])}",
        next_step=f"{again}. {_mending(directory)}; a storage that is lost is replaced by `waltzctl storage replace`",
    )


def unseen(directory: Path, error: WaltzError, running: Sequence[str]) -> WaltzError:
    """It ran, and then nobody could say how it is."""
    return type(error)(
        error.message,
        not_done=f"whether the partitions are open is not known; {_stays(running)}, and nothing was stopped",
        next_step=_mending(directory),
    )


def _closed(found: Overview, not_done: str, next_step: str) -> PartitionsClosed:
    waiting = "; ".join(f"partition {view.partition}: {view.waiting}" for view in found.closed[:TOLD_PARTITIONS])
    number = len(found.closed)
    return PartitionsClosed(
        f"{number} partition{' is' if number == 1 else 's are'} not open after {OPEN_SECONDS:g} seconds. {waiting}",
        not_done=not_done,
        next_step=next_step,
    )


def _stays(running: Sequence[str]) -> str:
    return f"{', '.join(running)} {'runs' if len(running) == 1 else 'run'}" if running else "nothing runs"


def _mending(directory: Path) -> str:
    place = shlex.quote(str(directory))
    return f"`waltzctl status --directory {place}` says what is missing, `waltzctl down {place}` stops everything"
