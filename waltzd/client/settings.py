"""Deadlines and limits of a client. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from waltzd.errors import BadArgument


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Deadlines and limits of a client, as an argument of `Client` and `BlockingClient`.

    The defaults suit applications that submit and follow at once. Times are in seconds; each limit is for one partition.

    Raises:
        BadArgument: A value is no number above 0.

    Example:
        ```python
        Client(servers, settings=ClientSettings(submit_seconds=10))
        ```
    """

    submit_seconds: float = 60.0
    """How long one attempt waits for its outcome. The default is longer than a fail-over."""
    call_seconds: float = 10.0
    """The deadline of one call to a server, and of the answer to a mount."""
    close_seconds: float = 10.0
    """How long closing, or giving up a partition, waits for outcomes."""
    attempts_max: int = 100
    """How often a context is built and sent before its last rejection is the outcome."""
    pending_max: int = 20_000
    """Transactions without an outcome; with more of them, `submit` and `append` wait."""
    pending_bytes_max: int = 32 << 20
    """The same in bytes; one transaction may exceed it."""
    messages_in_flight_max: int = 4
    """Messages that were sent and are not decided; what comes meanwhile travels in the next one."""
    bytes_in_flight_max: int = 8 << 20
    """The same in bytes."""
    feed_bytes_max: int = 4 << 20
    """Bytes of transactions that were fed and are not applied yet."""
    apply_batch_max: int = 1000
    """How many transactions `apply_batch` is given at once."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            kinds, what = (int, "an integer") if isinstance(setting.default, int) else ((int, float), "a number")
            if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
                raise BadArgument(f"{setting.name} must be {what} above 0, not {value!r}")
