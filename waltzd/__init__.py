"""Waltz: a distributed write-ahead log. This package is the library of applications, tools and daemons.

An application imports from here: `Client` or `BlockingClient`, the outcomes `Committed`, `Rejected` and `Unknown`, locks,
and what it implements itself (`View`, `Command`). Beside it stand `waltzd.sql`, views in databases,
`waltzd.testing`, a cluster within a test, and `waltzd.errors`. A name is loaded when it is first used, so that a tool
which needs a part of the library does not load the rest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waltzd.client.blocking import BlockingClient as BlockingClient
    from waltzd.client.blocking import BlockingDelivery as BlockingDelivery
    from waltzd.client.blocking import BlockingHandling as BlockingHandling
    from waltzd.client.blocking import BlockingSubscription as BlockingSubscription
    from waltzd.client.client import Client as Client
    from waltzd.client.delivery import Delivery as Delivery
    from waltzd.client.delivery import Reject as Reject
    from waltzd.client.partition import ClientStatus as ClientStatus
    from waltzd.client.partition import PartitionStatus as PartitionStatus
    from waltzd.client.pending import Outcomes as Outcomes
    from waltzd.client.position_file import PositionFile as PositionFile
    from waltzd.client.settings import ClientSettings as ClientSettings
    from waltzd.client.settings import Tls as Tls
    from waltzd.client.subscription import Handling as Handling
    from waltzd.client.subscription import Subscription as Subscription
    from waltzd.client.view import Builder as Builder
    from waltzd.client.view import Command as Command
    from waltzd.client.view import Decision as Decision
    from waltzd.client.view import Serializer as Serializer
    from waltzd.client.view import Transaction as Transaction
    from waltzd.client.view import View as View
    from waltzd.errors import WaltzError as WaltzError
    from waltzd.protocol.batches import FeedMode as FeedMode
    from waltzd.protocol.groups import GroupStatus as GroupStatus
    from waltzd.protocol.groups import ParkedTransaction as ParkedTransaction
    from waltzd.protocol.locks import AppendOutcome as AppendOutcome
    from waltzd.protocol.locks import Committed as Committed
    from waltzd.protocol.locks import Declined as Declined
    from waltzd.protocol.locks import History as History
    from waltzd.protocol.locks import Lock as Lock
    from waltzd.protocol.locks import LoggedLock as LoggedLock
    from waltzd.protocol.locks import Outcome as Outcome
    from waltzd.protocol.locks import Reason as Reason
    from waltzd.protocol.locks import Rejected as Rejected
    from waltzd.protocol.locks import Token as Token
    from waltzd.protocol.locks import Unknown as Unknown
    from waltzd.protocol.locks import append_lock as append_lock
    from waltzd.protocol.locks import read_lock as read_lock
    from waltzd.protocol.locks import write_lock as write_lock
    from waltzd.protocol.positions import Position as Position

_MODULES = {
    "client.blocking": ("BlockingClient", "BlockingDelivery", "BlockingHandling", "BlockingSubscription"),
    "client.client": ("Client",),
    "client.delivery": ("Delivery", "Reject"),
    "client.pending": ("Outcomes",),
    "client.position_file": ("PositionFile",),
    "client.settings": ("ClientSettings", "Tls"),
    "client.partition": ("ClientStatus", "PartitionStatus"),
    "client.subscription": ("Handling", "Subscription"),
    "client.view": (
        "Builder",
        "Decision",
        "View",
        "Serializer",
        "Transaction",
        "Command",
    ),
    "errors": ("WaltzError",),
    "protocol.batches": ("FeedMode",),
    "protocol.groups": ("GroupStatus", "ParkedTransaction"),
    "protocol.locks": (
        "AppendOutcome",
        "Committed",
        "Declined",
        "History",
        "Lock",
        "LoggedLock",
        "Outcome",
        "Reason",
        "Rejected",
        "Token",
        "Unknown",
        "append_lock",
        "read_lock",
        "write_lock",
    ),
    "protocol.positions": ("Position",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


__all__ = sorted(_MODULE_OF)  # `from waltzd import *` does not ask `__dir__`


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
