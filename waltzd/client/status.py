"""State of a client and of each of its partitions, for people and for monitoring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from waltzd.errors import WaltzError


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """State of one partition of a client; `Client.status` returns one for each."""

    partition: int
    """Number of the partition."""
    sentence: str
    """What the client does in the partition, and what it waits for."""
    is_ready: bool
    """Whether the partition is mounted, takes transactions at once, and its view does not fail."""
    applied: int
    """Highest id that the view has applied; without a view, the highest id known to be committed."""
    received: int
    """Highest id that was fed."""
    lag: int
    """Transactions between the view and the end of the log, as far as this client knows: while the view is behind, the
    owner is asked every few seconds. 0 without a view."""
    failing: str | None
    """Reason why the view cannot apply the next transaction; None while it can."""
    since: datetime | None
    """Time of the first failure of that transaction."""
    pending: int
    """Number of transactions without an outcome."""
    pending_bytes: int
    """Bytes of transactions without an outcome."""
    mounts: int
    """Number of times that the partition was mounted."""
    stopped: WaltzError | None
    """Error that stopped the partition; None if it is not stopped."""


class ClientStatus(tuple[PartitionStatus, ...]):
    """State of a client: the states of its partitions, for people and for monitoring.

    Example:
        ```python
        @app.get("/readyz")
        async def readyz():
            status = client.status()
            return Response(status_code=200 if status.ready else 503)
        ```
    """

    is_open: bool
    """Whether the client is open; a closed client has no partitions."""

    def __new__(cls, states: Iterable[PartitionStatus], *, is_open: bool) -> Self:
        found = super().__new__(cls, states)
        found.is_open = is_open
        return found

    @property
    def ready(self) -> bool:
        """True if the client is open and every partition is ready: none is stopped or waits for its owner, and no view
        fails."""
        return self.is_open and all(state.is_ready for state in self)

    @property
    def lag(self) -> int:
        """Lag of the partition whose view is furthest behind."""
        return max((state.lag for state in self), default=0)
