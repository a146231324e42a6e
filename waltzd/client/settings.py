"""Deadlines and limits of a client, and what it calls itself."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields
from importlib.metadata import version

from waltzd.errors import BadArgument
from waltzd.protocol.batches import Introduction

INSTANCE_MAX = 128


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The certificate of an application, as the argument `tls` of `Client` and `BlockingClient`: three files in PEM.

    They are read when the client is made, and again for new connections when they have changed: a certificate is renewed
    by replacing its file.

    Example:
        ```python
        Client(servers, tls=Tls(ca="ca.pem", certificate="billing.pem", key="billing.key"))
        ```
    """

    ca: str | os.PathLike[str]
    """The authorities that sign the certificates of the servers."""
    certificate: str | os.PathLike[str]
    """The certificate, with intermediate ones behind it. Its name is the one that policies and quotas speak of."""
    key: str | os.PathLike[str]
    """Its key, which only this application may read."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Deadlines and limits of a client, and what it calls itself, as an argument of `Client` and `BlockingClient`.

    The defaults suit applications that submit and follow at once. Times are in seconds; each limit is for one partition.

    Raises:
        BadArgument: A value is no number above 0, or `instance` cannot be shown.

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
    """How often a command is built and sent before its last rejection is the outcome."""
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
    idempotency_seconds: float = 600.0
    """How long an idempotency key holds at least, also for other processes and after a restart: all that write with keys
    into a partition need the same. What is looked for a key is the log of so long."""
    instance: str = ""
    """What this process of the application is called where operators look. Empty: `host:pid`."""
    exclusive: bool = False
    """Of all processes whose certificate has this name, only the newest may live. From the moment at which its mount of a
    partition stands, that partition takes nothing more of an older one, whose client ends there with `Superseded`. Without
    certificates all clients have one name."""

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
        """What servers are told of this client."""
        instance = self.instance or f"{socket.gethostname()}:{os.getpid()}"[-INSTANCE_MAX:]
        return Introduction(instance=instance, version=version("waltzd"), is_exclusive=self.exclusive)
