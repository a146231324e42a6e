"""What a person may say of how replicas move: how long to wait for it, and how fast they may copy.

A bound on copying that outlives what it was for slows down the next repair, and nobody remembers it. So this one ends with
the moves that it was set for, or with the command where nothing is written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from waltzctl.change import changing, who
from waltzctl.options import From, positive
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import CopyRate
from waltzd.daemon.settings import parse_size
from waltzd.errors import BadArgument


@dataclass(frozen=True, kw_only=True)
class Terms:
    seconds: float | None = None
    """For as long as it takes, without."""
    bytes_per_second: int | None = None
    """Of all that is copied for this command, together; as fast as servers let it, without."""
    keeps_rate: bool = False
    """Without a rate, the one that an interrupted command has set goes on."""


def _terms(
    seconds: Annotated[
        float | None,
        changing(
            "--timeout",
            parser=positive,
            metavar="SECONDS",
            help="Give up waiting after so long, more than 0; what was begun stays written down. For as long as it takes "
            "by default.",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        changing(
            "--rate",
            metavar="SIZE",
            help="Copy at most so much a second in all, as 50MB, until the moves have ended; never faster than the "
            "servers' `catch_up_bytes_per_second`.",
        ),
    ] = None,
) -> Terms:
    return Terms(seconds=seconds, bytes_per_second=None if rate is None else _rate_of(rate))


Moving = Annotated[Terms, From(_terms)]


def _rate_of(text: str) -> int:
    try:
        found = parse_size(text.removesuffix("/s"))
    except ValueError as error:
        raise BadArgument(f"--rate: {error}") from error
    if found < 1:
        raise BadArgument("--rate: nothing would ever be copied", next_step="say 1MB, or leave it out for no bound")
    return found


class Throttle:
    """`lasts`: longer than this command, for a move that is written down; whoever ends the move lifts it."""

    def __init__(self, cluster: Cluster, bytes_per_second: int | None, *, lasts: bool = False) -> None:
        self._cluster = cluster
        self._bytes_per_second = bytes_per_second
        self._lasts = lasts
        self._said: tuple[int, int] | None = None

    async def share(self, copies: int) -> None:
        """So many replicas copy now, for this command. It is said anew to a new session of the coordinator."""
        if self._bytes_per_second is None or copies == 0:
            return
        each = max(1, self._bytes_per_second // copies)
        saying = (each, self._cluster.coordinator.session)
        if saying != self._said:
            rate = CopyRate(bytes_per_second=each, who=who())
            await self._cluster.set_copy_rate(rate, lasts=self._lasts)
            self._said = saying

    async def lift(self) -> None:
        await self._cluster.lift_copy_rate()
