"""Timeouts, limits and identity of a client."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields

from waltzd.errors import BadArgument
from waltzd.protocol.batches import Introduction

INSTANCE_MAX = 128


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificate of an application: the argument `tls` of `Client` and `BlockingClient`, as three files in PEM.

    The files are read when the client is made, and again for new connections if they have changed: to renew a
    certificate, replace its file.

    Example:
        ```python
        Client(servers, tls=Tls(ca="ca.pem", certificate="billing.pem", key="billing.key"))
        ```
    """

    ca: str | os.PathLike[str]
    """Path of the authorities that sign the certificates of the servers."""
    certificate: str | os.PathLike[str]
    """Path of the certificate, followed by intermediate ones. Policies and quotas refer to its name."""
    key: str | os.PathLike[str]
    """Path of the private key, which only this application may read."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Timeouts, limits and identity of a client: the argument `settings` of `Client` and `BlockingClient`.

    The defaults suit applications that submit and follow at once. Times are in seconds; each limit is for one
    partition.

    Raises:
        BadArgument: A value is no number above 0, or `instance` is not printable.

    Example:
        ```python
        Client(servers, settings=ClientSettings(submit_seconds=10))
        ```
    """

    submit_seconds: float = 60.0
    """Seconds that one attempt waits for its outcome. The default is longer than a fail-over."""
    call_seconds: float = 10.0
    """Timeout in seconds of one call to a server, and of the answer to a mount."""
    close_seconds: float = 10.0
    """Seconds that closing the client, or removing a partition, waits for outcomes."""
    attempts_max: int = 100
    """Number of times a command is built and sent before its last rejection is the outcome."""
    pending_max: int = 20_000
    """Limit of transactions without an outcome; above it, `submit` and `append` wait."""
    pending_bytes_max: int = 32 << 20
    """Limit of the bytes of transactions without an outcome; a single transaction may exceed it."""
    messages_in_flight_max: int = 4
    """Limit of messages in flight; requests that come meanwhile travel in the next message."""
    bytes_in_flight_max: int = 8 << 20
    """Limit of bytes in flight."""
    feed_bytes_max: int = 4 << 20
    """Limit of bytes that were fed and are not applied yet."""
    apply_batch_max: int = 1000
    """Limit of transactions in one call of `apply_batch`."""
    idempotency_seconds: float = 600.0
    """Seconds that an idempotency key is kept at least, also for other processes and after a restart. All clients that
    write with keys into a partition need the same value. To look for a key, a client reads the log of this time."""
    instance: str = ""
    """Name of this process of the application, which operators see. Empty: `host:pid`."""
    exclusive: bool = False
    """Whether only the newest process with the name of the certificate may work. From its mount of a partition on, that
    partition takes nothing from an older process, whose client stops there with `Superseded`. Without certificates all
    clients have one name."""

    def __post_init__(self) -> None:
        if not isinstance(self.exclusive, bool):
            raise BadArgument(f"exclusive must be True or False, not {self.exclusive!r}")
        if not (isinstance(self.instance, str) and len(self.instance) <= INSTANCE_MAX and self.instance.isprintable()):
            raise BadArgument(f"instance must be a printable text of at most {INSTANCE_MAX} characters")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in ("instance", "exclusive"):
                continue
            kinds, what = (int, "an integer") if isinstance(setting.default, int) else ((int, float), "a number")
            if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
                raise BadArgument(f"{setting.name} must be {what} above 0, not {value!r}")

    @property
    def introduction(self) -> Introduction:
        """Introduction that the client sends to servers."""
        instance = self.instance or f"{socket.gethostname()}:{os.getpid()}"[-INSTANCE_MAX:]
        from importlib.metadata import version  # its import takes a tenth of the library's

        return Introduction(instance=instance, version=version("waltzd"), is_exclusive=self.exclusive)
