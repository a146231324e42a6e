"""Waltz: a distributed write-ahead log. This package is the library that applications, tools and daemons share.

What applications use can be imported from here; each name is loaded when it is asked for, so that a tool which only needs
a part of the library does not load the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waltzd.client import Client as Client
    from waltzd.client_blocking import BlockingClient as BlockingClient
    from waltzd.client_settings import ClientSettings as ClientSettings
    from waltzd.errors import WaltzError as WaltzError
    from waltzd.frame import FeedMode as FeedMode
    from waltzd.lock import Lock as Lock
    from waltzd.lock import append_lock as append_lock
    from waltzd.lock import read_lock as read_lock
    from waltzd.lock import write_lock as write_lock
    from waltzd.outcome import Committed as Committed
    from waltzd.outcome import Outcome as Outcome
    from waltzd.outcome import Reason as Reason
    from waltzd.outcome import Rejected as Rejected
    from waltzd.outcome import Unknown as Unknown
    from waltzd.submission import Outcomes as Outcomes
    from waltzd.transaction import Builder as Builder
    from waltzd.transaction import Decision as Decision
    from waltzd.transaction import Declined as Declined
    from waltzd.transaction import Handler as Handler
    from waltzd.transaction import Serializer as Serializer
    from waltzd.transaction import Transaction as Transaction
    from waltzd.transaction import TransactionContext as TransactionContext

_MODULES = {
    "client": ("Client",),
    "client_blocking": ("BlockingClient",),
    "client_settings": ("ClientSettings",),
    "errors": ("WaltzError",),
    "frame": ("FeedMode",),
    "lock": ("Lock", "append_lock", "read_lock", "write_lock"),
    "outcome": ("Committed", "Outcome", "Reason", "Rejected", "Unknown"),
    "submission": ("Outcomes",),
    "transaction": (
        "Builder",
        "Decision",
        "Declined",
        "Handler",
        "Serializer",
        "Transaction",
        "TransactionContext",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


__all__ = sorted(_MODULE_OF)  # `from waltzd import *` does not ask `__dir__`


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
