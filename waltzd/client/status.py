"""How a client is: what it tells of each of its partitions, for people and for monitoring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from waltzd.errors import WaltzError


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition of a client.

    `Client.status` returns one for each partition."""

    partition: int
    """Which one."""
    sentence: str
    """What the client does there, and what it waits for."""
    is_ready: bool
    """It is mounted, transactions leave at once, and the view is not failing."""
    applied: int
    """The highest id that the view has applied; without a view, the highest that is known to be committed."""
    received: int
    """The highest id that was fed."""
    lag: int
    """How many transactions the view is behind the end of the log, as far as this client knows: while the view is behind,
    the owner is asked every few seconds. 0 without a view."""
    failing: str | None
    """Why the view cannot apply what is next; None while it can."""
    since: datetime | None
    """When that failed for the first time."""
    pending: int
    """Transactions without an outcome yet."""
    pending_bytes: int
    """Their size."""
    mounts: int
    """How often it was mounted."""
    stopped: WaltzError | None
    """Why it takes nothing any more, or None."""


class ClientStatus(tuple[PartitionStatus, ...]):
    """How a client is: the state of each of its partitions, for people and for monitoring.

    Example:
        ```python
        @app.get("/readyz")
        async def readyz():
            status = client.status()
            return Response(status_code=200 if status.ready else 503)
        ```
    """

    is_open: bool
    """The client is open: one that is not has no partitions."""

    def __new__(cls, states: Iterable[PartitionStatus], *, is_open: bool) -> Self:
        found = super().__new__(cls, states)
        found.is_open = is_open
        return found

    @property
    def ready(self) -> bool:
        """Whether the client is open and every partition is ready: none is stopped, none waits for its owner, and no view
        fails."""
        return self.is_open and all(state.is_ready for state in self)

    @property
    def lag(self) -> int:
        """Of the partition whose view is furthest behind."""
        return max((state.lag for state in self), default=0)
