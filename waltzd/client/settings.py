"""What a client may be told about itself. The defaults suit applications that submit and follow at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields

from waltzd.errors import BadArgument


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Times are in seconds; limits are for each partition."""

    submit_seconds: float = 60.0
    """How long one attempt waits for an outcome; longer than a fail-over."""
    call_seconds: float = 10.0
    """The deadline of one call to a server, and of the answer to a mount."""
    close_seconds: float = 10.0
    """How long closing, or giving a partition back, waits for what is under way."""
    attempts_max: int = 100
    """How often a context is built and sent before its last rejection is the outcome."""
    pending_max: int = 20_000
    """Transactions that are not decided; `submit` waits above it."""
    pending_bytes_max: int = 32 << 20
    """The same in bytes; one transaction more than fits may pass."""
    messages_in_flight_max: int = 4
    bytes_in_flight_max: int = 8 << 20
    """Sent and not decided; what comes meanwhile travels in the next message. Little waits for one message only."""
    feed_bytes_max: int = 4 << 20
    """Fed, and not yet applied by the handler."""
    apply_batch_max: int = 1000
    """How many transactions `apply_batch` is given at once."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            kinds, what = (int, "an integer") if isinstance(setting.default, int) else ((int, float), "a number")
            if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
                raise BadArgument(f"{setting.name} must be {what} above 0, not {value!r}")
